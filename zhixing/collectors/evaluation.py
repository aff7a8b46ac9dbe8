"""Results of episodes and of evaluations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from zhixing.utils import tables

MIN_EVAL_STEPS = 5_000  # smallest default step limit of evaluation episodes


def default_eval_steps(time_limit: int | None, longest_episode: int = 0) -> int | None:
    """Return the default step limit of evaluation episodes; None if the environment has a time limit.

    Without a time limit, an episode may never end. It is cut after twice the steps of the longest training episode, but
    not before `MIN_EVAL_STEPS`.
    """
    return None if time_limit is not None else max(MIN_EVAL_STEPS, 2 * longest_episode)


class Episode(NamedTuple):
    """A finished episode: its undiscounted return, its number of steps, and the numbers in its last `info`."""

    episode_return: float
    length: int
    info: dict[str, float]
    cut: bool = False  # by the step limit of an evaluation, not by the environment


def metric_name(name: str) -> str:
    """Return the name of the metric that averages a key of `info` over episodes."""
    return "win_rate" if name == "won" else name


@dataclass(frozen=True)
class Evaluation:
    """Fresh episodes of a policy in evaluation mode.

    `references` are the mean returns of a random and an expert policy, if known. They define the `score`.
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
        """Number of episodes that the step limit cut. Their returns cover only the steps before the cut."""
        return sum(episode.cut for episode in self.episodes)

    def summary(self) -> dict[str, float]:
        """Return the metrics that `zhixing eval --json` prints. Numbers in `info` are averaged over episodes."""
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

    def _repr_html_(self) -> str:
        return tables.html_table([{"": k.replace("_", " "), "evaluation": v} for k, v in self.summary().items()])


def normalized_score(mean_return: float, references: Mapping[str, float]) -> float:
    """Return the score that D4RL defines: 0 for a random policy, 100 for an expert."""
    random, expert = references["random"], references["expert"]
    return 100.0 * (mean_return - random) / (expert - random)
