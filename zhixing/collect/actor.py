"""The actor: a policy in a vector of environments. The only loop that steps an environment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from zhixing.buffers.rollout import Rollout
from zhixing.core.batch import Batch
from zhixing.core.policy import Phase, Policy, as_tensor
from zhixing.core.seeding import stream
from zhixing.core.state import count
from zhixing.core.tree import Tree, tree_map
from zhixing.envs.crash.failure_policy import INTERRUPTED
from zhixing.envs.env_spec import BESIDE
from zhixing.envs.vector.base import VectorEnv

MIN_EVAL_STEPS = 5_000  # of an evaluation episode before it is cut, where nothing is known of its length


def default_eval_steps(time_limit: int | None, longest_episode: int = 0) -> int | None:
    """Return the number of steps after which an evaluation episode is cut; None where a time limit ends it anyway.

    Without a time limit a policy may never end an episode: it is cut after twice the steps of the longest training
    episode, and not before `MIN_EVAL_STEPS`.
    """
    return None if time_limit is not None else max(MIN_EVAL_STEPS, 2 * longest_episode)


class Episode(NamedTuple):
    """A finished episode: its undiscounted return, its steps, and numbers that the task told at its end."""

    ret: float
    length: int
    info: dict[str, float]
    cut: bool = False  # by the bound of an evaluation; the environment hasn't ended it


def told_as(name: str) -> str:
    """The mean over episodes of a number that a task tells at their ends, as it is called where people read it."""
    return "win_rate" if name == "won" else name


@dataclass(frozen=True)
class Evaluation:
    """Fresh episodes played as well as the policy can.

    `references` are the mean returns of a random and an expert policy, where they are known: what `score` is made of.
    """

    episodes: list[Episode]
    references: Mapping[str, float] = field(default_factory=dict)

    @property
    def returns(self) -> np.ndarray[Any, Any]:
        return np.array([episode.ret for episode in self.episodes])

    @property
    def mean_return(self) -> float:
        return float(self.returns.mean())

    @property
    def cut_episodes(self) -> int:
        """Number of episodes that the environment didn't end: their returns are those of their first steps."""
        return sum(episode.cut for episode in self.episodes)

    def summary(self) -> dict[str, float]:
        """What `zhixing eval --json` prints; numbers that the task tells at its ends are averaged."""
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
        told = {key for episode in self.episodes for key in episode.info} - {*summary, "score"}
        means = {
            told_as(key): float(np.mean([e.info[key] for e in self.episodes if key in e.info])) for key in sorted(told)
        }
        if self.references:
            summary["score"] = normalised_score(self.mean_return, self.references)
        return summary | means


def normalised_score(mean_return: float, references: Mapping[str, float]) -> float:
    """As D4RL defines it: 0 for a random policy, 100 for an expert."""
    random, expert = references["random"], references["expert"]
    return 100.0 * (mean_return - random) / (expert - random)


class Experience(NamedTuple):
    """What `collect` brings: steps `[T,N]` as NumPy arrays, and the episodes that ended among them."""

    batch: Batch
    episodes: list[Episode]


class Actor:
    """`collect` goes on where the last one stopped; `evaluate` plays whole fresh episodes."""

    def __init__(
        self,
        policy: Policy,
        env: VectorEnv,
        fields: dict[str, Tree] | None = None,
        *,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        """`fields` are what the learner declares: kept from each decision besides what every step holds."""
        self.policy, self.env, self.spaces, self.device = policy, env, env.spaces, torch.device(device)
        policy.watch(env)  # refuses those that it can't follow
        self.fields = fields or {}
        self.seed = seed
        self.rng = torch.Generator(self.device).manual_seed(stream(seed, "actor"))
        self.env_steps = 0
        self.schedule_lead = 0  # environment steps by which the policy's schedules are ahead
        self.rollout: Rollout | None = None  # the steps of the last `collect`
        self._obs: Tree = None  # what the environments show now; None before the first step
        self._beside: dict[str, Any] = {}  # and what they show beside it: mask, state, alive
        self._names = [(name, BESIDE[name]) for name in self.spaces.beside()]

    def _start(self, seed: int) -> None:
        self._see(*self.env.reset(seed=seed))
        self._hidden = self.policy.initial_hidden(self.env.num_envs)
        self._returns = np.zeros((self.env.num_envs, *self.spaces.agents))
        self._lengths = np.zeros(self.env.num_envs, np.int64)

    def _see(self, obs: Tree, info: dict[str, Any]) -> None:
        self._obs = obs
        self._beside = {name: info[key] for name, key in self._names}

    def collect(
        self, steps: int | None = None, episodes: int | None = None, phase: Phase = Phase.COLLECT
    ) -> Experience:
        """Take `steps` steps in each environment, or as many as it takes until `episodes` have ended.

        The batch's arrays are overwritten by the next call.
        """
        if (steps is None) == (episodes is None):
            raise ValueError("collect takes either steps=... or episodes=...")
        if self._obs is None:
            self._start(stream(self.seed, "environments"))
        self.policy.watch(self.env)  # others may have let it act elsewhere
        rollout = self._storage(steps or 256)
        rollout.clear()
        rollout.write(0, obs=self._obs, **self._beside)
        done: list[Episode] = []
        t = 0
        with torch.inference_mode():
            while t < steps if steps is not None else len(done) < episodes:  # type: ignore[operator]
                if t == rollout.num_steps:
                    rollout = self._storage(2 * t, rollout)
                done += self._step(phase, rollout, t).values()
                t += 1
        return Experience(rollout.batch(t), done)

    def _step(self, phase: Phase, rollout: Rollout | None, t: int) -> dict[int, Episode]:
        """One step of every environment, written to row t; gives the episodes that ended, by environment."""
        hidden = self._hidden
        mask = as_tensor(self._beside["mask"], self.device) if "mask" in self._beside else None
        decision = self.policy.act(
            as_tensor(self._obs, self.device), hidden, mask, phase, self.rng, self.env_steps + self.schedule_lead
        )
        action = decision.action.cpu().numpy()
        obs, reward, terminated, truncated, info = self.env.step(self.spaces.to_env(action))
        self._see(obs, info)
        self._hidden = decision.hidden
        self.env_steps += self.env.num_envs
        ended = terminated | truncated
        if rollout is not None:
            rollout.write(t, action=action, reward=reward, terminated=terminated, truncated=truncated)
            for name in self.fields:
                rollout.write(t, **{name: tree_map(lambda leaf: leaf.cpu().numpy(), decision.kept(name, hidden))})
            rollout.write(t + 1, obs=obs, **self._beside)
        self._returns += reward
        self._lengths += 1
        return self._finish(ended, info, rollout, t) if 1 in ended.tobytes() else {}  # a third of any()'s cost

    def _finish(self, ended: Any, info: dict[str, Any], rollout: Rollout | None, t: int) -> dict[int, Episode]:
        envs = np.flatnonzero(ended)
        if rollout is not None:
            rollout.write_last(t, envs, "obs", info["final_obs"])
            for name in self._beside:
                rollout.write_last(t, envs, name, info[f"final_{name}"])
        final_info = info.get("final_info", {})
        episodes = {
            i: Episode(float(np.mean(self._returns[i])), int(self._lengths[i]), final_info.get(i, {}))
            for i in envs.tolist()
            if INTERRUPTED not in final_info.get(i, {})  # its return says nothing of the policy
        }
        self._returns[envs] = 0.0
        self._lengths[envs] = 0
        if self._hidden is not None:
            rows = torch.as_tensor(envs, device=self.device)
            tree_map(lambda leaf: leaf.index_fill_(0, rows, 0.0), self._hidden)
        return episodes

    def _storage(self, steps: int, old: Rollout | None = None) -> Rollout:
        """Room for so many steps, with the rows of `old` in front."""
        if self.rollout is None or self.rollout.num_steps != steps:
            new = Rollout({**self.spaces.fields(), **self.fields}, steps, self.env.num_envs)
            if old is not None:
                new.take(old)
            self.rollout = new
        return self.rollout

    @torch.no_grad()
    def evaluate(
        self, episodes: int, seed: int, look: Callable[[], None] = lambda: None, max_steps: int | None = None
    ) -> Evaluation:
        """Play fresh episodes as well as the policy can. The same seed gives the same episodes. `look` is called at
        the start and after each step, such as to film; what it raises ends the evaluation.

        Each environment plays its share, since the first to end are the short ones. Episodes are cut after `max_steps`
        steps, by default as `default_eval_steps` says. Leaves no trace in `collect` but the environments' state: give
        evaluations an actor of their own.
        """
        num = self.env.num_envs
        most = max_steps or default_eval_steps(self.env.max_episode_steps)
        self.policy.watch(self.env)
        self.rng.manual_seed(stream(seed, "evaluation"))
        owed = [episodes // num + (i < episodes % num) for i in range(num)]
        played: list[list[Episode]] = [[] for _ in owed]
        rounds = 0
        try:
            while any(owed):
                # one environment can't be reset alone: those whose episode was cut wait until all others are done
                rounds += 1
                again = () if rounds == 1 else (rounds,)
                self._start(stream(seed, "evaluation environments", *again))
                look()
                waiting = [count == 0 for count in owed]
                while not all(waiting):
                    ended = self._step(Phase.EVAL, None, 0)
                    if most is not None and self._lengths.max() >= most:
                        ended |= {i: self._cut(i) for i in np.flatnonzero(self._lengths >= most).tolist()}
                    for i, episode in ended.items():
                        if not waiting[i]:
                            played[i].append(episode)
                            owed[i] -= 1
                            waiting[i] = episode.cut or owed[i] == 0
                    look()
        finally:
            self._obs = None
        return Evaluation([episode for mine in played for episode in mine])

    def _cut(self, i: int) -> Episode:
        return Episode(float(np.mean(self._returns[i])), int(self._lengths[i]), {}, cut=True)

    @property
    def tells(self) -> tuple[str, ...]:
        """Numbers of the task, at the ends of its episodes, that are worth a log."""
        return self.env.tells

    @property
    def replaced(self) -> int:
        """How often an environment failed and another took its place."""
        return self.env.replaced

    @property
    def longest_running(self) -> int:
        """Steps of the longest episode that hasn't ended yet."""
        return 0 if self._obs is None else int(self._lengths.max())

    def close(self) -> None:
        self.env.close()

    def load(self, weights: dict[str, torch.Tensor]) -> None:
        """Act with these weights from now on."""
        self.policy.load_state_dict(weights)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"env_steps": self.env_steps, "rng": self.rng.get_state()}
        if self._obs is not None:
            state |= {
                "env": self.env.state_dict(),
                "hidden": self._hidden,
                "returns": self._returns,
                "lengths": self._lengths,
            }
        return state

    def load_state_dict(self, state: dict[str, Any]) -> list[int]:
        """Returns the environments that could not be put back into mid-episode; their episodes start anew."""
        self.env_steps = count("the actor", state, "env_steps")
        self.rng.set_state(state["rng"])
        if "env" not in state:
            return []
        self._start(0)
        self._see(*self.env.load_state_dict(state["env"]))
        if state["hidden"] is not None:
            self._hidden = tree_map(lambda leaf: leaf.to(self.device), state["hidden"])
        self._returns[:], self._lengths[:] = state["returns"], state["lengths"]
        lost = list(self.env.inexact)
        self._returns[lost], self._lengths[lost] = 0.0, 0
        if lost and self._hidden is not None:
            tree_map(lambda leaf: leaf.index_fill_(0, torch.as_tensor(lost, device=self.device), 0.0), self._hidden)
        return lost
