"""Results of episodes: single ones, and the summary of an evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

MIN_EVAL_STEPS = 5_000  # an evaluation episode without a time limit is never cut earlier


def default_eval_steps(time_limit: int | None, longest_episode: int = 0) -> int | None:
    """Return the number of steps after which an evaluation episode is cut; None if a time limit ends it anyway.

    Without a time limit a policy may never end an episode: it is cut after twice the steps of the longest training
    episode, and not before `MIN_EVAL_STEPS`.
    """
    return None if time_limit is not None else max(MIN_EVAL_STEPS, 2 * longest_episode)


class Episode(NamedTuple):
    """A finished episode: its undiscounted return, its number of steps, and the numbers in its last `info`."""

    episode_return: float
    length: int
    info: dict[str, float]
    cut: bool = False  # by the step limit of an evaluation; the environment hasn't ended it


def metric_name(name: str) -> str:
    """Return the name under which the mean over episodes of a number in `info` is logged."""
    return "win_rate" if name == "won" else name


@dataclass(frozen=True)
class Evaluation:
    """Fresh episodes of a policy in evaluation mode.

    `references` are the mean returns of a random and an expert policy, if known; `score` is computed from them.
    """

    episodes: list[Episode]
    references: Mapping[str, float] = field(default_factory=dict)

    @property
    def returns(self) -> np.ndarray[Any, Any]:
        return np.array([episode.episode_return for episode in self.episodes])

    @property
    def mean_return(self) -> float:
        return float(self.returns.mean())

    @property
    def cut_episodes(self) -> int:
        """Number of episodes that the environment didn't end: their returns are those of their first steps."""
        return sum(episode.cut for episode in self.episodes)

    def summary(self) -> dict[str, float]:
        """Return what `zhixing eval --json` prints. Numbers in `info` are averaged over episodes."""
        lengths = [episode.length for episode in self.episodes]
        summary: dict[str, float] = {
            "mean_return": self.mean_return,
            "std_return": float(self.returns.std()),
            "min_return": float(self.returns.min()),
            "max_return": float(self.returns.max()),
            "mean_length": float(np.mean(lengths)),
            "episodes": len(self.episodes),
            "cut_episodes": self.cut_episodes,
        }
        keys = {key for episode in self.episodes for key in episode.info} - {*summary, "score"}
        means = {
            metric_name(key): float(np.mean([e.info[key] for e in self.episodes if key in e.info]))
            for key in sorted(keys)
        }
        if self.references:
            summary["score"] = normalized_score(self.mean_return, self.references)
        return summary | means


def normalized_score(mean_return: float, references: Mapping[str, float]) -> float:
    """Return the score that D4RL defines: 0 for a random policy, 100 for an expert."""
    random, expert = references["random"], references["expert"]
    return 100.0 * (mean_return - random) / (expert - random)
