"""Collection in environments written in torch. Observations, actions and rollouts stay on one device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zhixing.buffers.fields import SUCCESSORS
from zhixing.collectors.collector import Collector, Experience, check_collect, collect_episodes
from zhixing.collectors.evaluation import Episode
from zhixing.core.batch import Batch
from zhixing.core.policy import Phase, Policy
from zhixing.core.seeding import derive_seed
from zhixing.core.state import read_count
from zhixing.core.tree import Field, Tree, tree_leaves, tree_map
from zhixing.envs.torch_native import TorchVectorEnv


class TorchActor(Collector):
    """Collects like `Actor`, but synchronizes with the device only after the last step."""

    def __init__(
        self, policy: Policy, env: TorchVectorEnv, extra_fields: Mapping[str, Tree] | None = None, *, seed: int = 0
    ) -> None:
        self.policy, self.env, self.device = policy, env, env.device
        policy.bind_env(env)
        self.extra_fields = dict(extra_fields or {})
        self.seed = seed
        self.rng = torch.Generator(self.device).manual_seed(derive_seed(seed, "actor"))
        self.env_steps = 0
        self.schedule_lead = 0  # environment steps by which the policy's schedules are ahead of `env_steps`
        self.rollout: TensorRollout | None = None  # the steps of the last `collect`
        self._obs_fields: dict[str, Tensor] = {}  # current `obs`, `mask` and the like; empty before the first step

    def _start(self, seed: int) -> None:
        num = self.env.num_envs
        self._obs_fields = self.env.reset_tensors(seed)
        self._hidden = self.policy.initial_hidden(num)
        self._returns = torch.zeros(num, *self.env.spaces.agents, device=self.device)
        self._lengths = torch.zeros(num, dtype=torch.int64, device=self.device)

    def collect(
        self, steps: int | None = None, episodes: int | None = None, phase: Phase = Phase.COLLECT
    ) -> Experience:
        """Take `steps` steps in each environment, or step until `episodes` have ended.

        The next call overwrites the batch's tensors.
        """
        check_collect(steps, episodes)
        if episodes is not None:
            return collect_episodes(lambda steps: self._collect(steps, phase), episodes)
        assert steps is not None
        return self._collect(steps, phase)

    def _collect(self, steps: int, phase: Phase) -> Experience:
        if not self._obs_fields:
            self._start(derive_seed(self.seed, "environments"))
        rollout = self._storage(steps)
        rollout.infos.clear()
        rollout.write(0, **self._obs_fields)
        with torch.inference_mode():
            for t in range(steps):
                self._step(phase, rollout, t)
        return Experience(rollout.batch, rollout.episodes())

    def _step(self, phase: Phase, rollout: TensorRollout, t: int) -> None:
        hidden = self._hidden
        obs, mask = rollout.rows["obs"][t], rollout.rows["mask"][t] if "mask" in rollout.rows else None
        decision = self.policy.act(obs, hidden, mask, phase, self.rng, self.env_steps + self.schedule_lead)
        step = self.env.step_tensors(self.env.to_env_action(decision.action))
        self.env_steps += self.env.num_envs
        self._obs_fields, self._hidden = step.obs_fields, decision.hidden
        for name in self.extra_fields:
            rollout.write(t, **{name: decision.field(name, hidden)})
        self._returns = self._returns + step.reward
        self._lengths = self._lengths + 1
        rollout.write(
            t,
            action=decision.action,
            reward=step.reward,
            terminated=step.terminated,
            truncated=step.truncated,
            episode_return=self._returns,
            episode_length=self._lengths,
            **{SUCCESSORS[name]: tensor for name, tensor in step.final_obs_fields.items()},
        )
        rollout.infos.append(step.info)
        rollout.write(t + 1, **step.obs_fields)
        self._returns, self._lengths = _clear_ended((self._returns, self._lengths), step.ended)
        if self._hidden is not None:
            self._hidden = _clear_ended(self._hidden, step.ended)

    def _storage(self, steps: int) -> TensorRollout:
        if self.rollout is None or self.rollout.num_steps != steps:
            fields = {**self.env.spaces.fields(), **self.extra_fields}
            self.rollout = TensorRollout(fields, steps, self.env.num_envs, self.device)
        return self.rollout

    @property
    def longest_running(self) -> int:
        return int(self._lengths.max()) if self._obs_fields else 0

    @property
    def logged_info_keys(self) -> tuple[str, ...]:
        return self.env.logged_info_keys

    def close(self) -> None:
        self.env.close()

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"env_steps": self.env_steps, "rng": self.rng.get_state()}
        if self._obs_fields:
            state |= {
                "env": self.env.state_dict(),
                "hidden": None if self._hidden is None else tree_map(torch.clone, self._hidden),
                "returns": self._returns.clone(),
                "lengths": self._lengths.clone(),
            }
        return state

    def load_state_dict(self, state: dict[str, Any]) -> list[int]:
        self.env_steps = read_count("the actor", state, "env_steps")
        self.rng.set_state(state["rng"])
        if "env" in state:
            self._start(0)
            self.env.load_state_dict(state["env"])
            self._obs_fields = self.env.obs_fields()
            if state["hidden"] is not None:
                self._hidden = tree_map(lambda leaf: leaf.to(self.device), state["hidden"])
            self._returns, self._lengths = state["returns"].to(self.device), state["lengths"].to(self.device)
        return []


class TensorRollout:
    """Steps `[T,N]` in tensors that are allocated once.

    Unlike `Rollout`, it stores the successors of every step, such as `next_obs`. To store only those at the ends of
    episodes, the host would need their number and wait for the device.
    """

    def __init__(self, spec: Mapping[str, Tree], num_steps: int, num_envs: int, device: torch.device) -> None:
        self.num_steps = num_steps
        self.infos: list[dict[str, Tensor]] = []  # `info` of each step, valid where episodes ended
        extra = {"episode_return": spec["reward"], "episode_length": Field((), np.dtype(np.int64))}
        extra |= {successor: spec[name] for name, successor in SUCCESSORS.items() if name in spec}

        def allocate(field: Field, rows: int) -> Tensor:
            dtype = torch.from_numpy(np.empty(0, field.dtype)).dtype
            return torch.zeros((rows, num_envs, *field.shape), dtype=dtype, device=device)

        self.tensors: dict[str, Tree] = {
            name: tree_map(lambda field, rows=num_steps + (name in SUCCESSORS): allocate(field, rows), tree)
            for name, tree in {**spec, **extra}.items()
        }
        # views of single steps, made once instead of in each step
        self.rows = {name: _rows(tree) for name, tree in self.tensors.items()}
        fields = {name: tree for name, tree in self.tensors.items() if not name.startswith("episode_")}
        self.batch = Batch(**{name: tree_map(lambda leaf: leaf[:num_steps], tree) for name, tree in fields.items()})

    def write(self, t: int, **values: Tree) -> None:
        for name, value in values.items():
            for target, leaf in zip(tree_leaves(self.rows[name][t]), tree_leaves(value), strict=True):
                target.copy_(leaf)

    def episodes(self) -> list[Episode]:
        """Return the ended episodes in the order in which they ended."""
        ended = self.tensors["terminated"] | self.tensors["truncated"]
        returns, lengths = (self.tensors[name][ended] for name in ("episode_return", "episode_length"))
        if returns.ndim > 1:
            returns = returns.mean(-1)  # over agents
        episodes = [Episode(*row, {}) for row in zip(returns.tolist(), lengths.tolist(), strict=True)]
        for name in self.infos[0]:
            values = torch.stack([info[name] for info in self.infos])[ended].tolist()
            for episode, number in zip(episodes, values, strict=True):
                episode.info[name] = number
        return episodes


def _clear_ended(tree: Tree, ended: Tensor) -> Tree:
    """Return a copy of the tree with zeros where episodes ended."""
    return tree_map(lambda leaf: leaf.masked_fill(ended.view(-1, *[1] * (leaf.ndim - 1)), 0), tree)


def _rows(tree: Tree) -> list[Tree]:
    """Split a tree of `[T,N,...]` into T trees of `[N,...]`."""
    if isinstance(tree, Tensor):
        return list(tree.unbind())
    if isinstance(tree, Mapping):
        parts = {key: _rows(part) for key, part in tree.items()}
        return [dict(zip(parts, row, strict=True)) for row in zip(*parts.values(), strict=True)]
    return list(zip(*(_rows(part) for part in tree), strict=True))
