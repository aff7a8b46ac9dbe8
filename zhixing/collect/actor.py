"""The actor: a policy in a vector of environments."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from zhixing.buffers.rollout import Rollout
from zhixing.collect.collector import Collector, Experience, check_collect
from zhixing.collect.evaluation import Episode, Evaluation, default_eval_steps
from zhixing.core.policy import Phase, Policy, as_tensor
from zhixing.core.seeding import derive_seed
from zhixing.core.state import read_count
from zhixing.core.tree import Tree, tree_map
from zhixing.envs.crash.failure_policy import INTERRUPTED
from zhixing.envs.env_spec import INFO_KEYS
from zhixing.envs.vector.base import VectorEnv


class Actor(Collector):
    """Collects experience with a policy in a vector of environments, and evaluates the policy in them.

    `collect` continues where the last call stopped. `evaluate` plays whole fresh episodes; give evaluations an actor
    with environments of their own.
    """

    def __init__(
        self,
        policy: Policy,
        env: VectorEnv,
        fields: dict[str, Tree] | None = None,
        *,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        """`fields` are the extra fields that the learner declares: values of the policy's decisions to store."""
        self.policy, self.env, self.spaces, self.device = policy, env, env.spaces, torch.device(device)
        policy.bind_env(env)  # rejects environments that it can't act in
        self.fields = fields or {}
        self.seed = seed
        self.rng = torch.Generator(self.device).manual_seed(derive_seed(seed, "actor"))
        self.env_steps = 0
        self.schedule_lead = 0  # environment steps by which the policy's schedules are ahead of `env_steps`
        self.rollout: Rollout | None = None  # the steps of the last `collect`
        self._obs: Tree = None  # current observations; None before the first step
        self._beside: dict[str, Any] = {}  # what environments return with them: mask, state, alive
        self._names = [(name, INFO_KEYS[name]) for name in self.spaces.extras()]

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
        check_collect(steps, episodes)
        if self._obs is None:
            self._start(derive_seed(self.seed, "environments"))
        self.policy.bind_env(self.env)  # the policy may have acted in other environments since
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
        """Step every environment, write row t, and return the episodes that ended, by environment."""
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
                rollout.write(t, **{name: tree_map(lambda leaf: leaf.cpu().numpy(), decision.field(name, hidden))})
            rollout.write(t + 1, obs=obs, **self._beside)
        self._returns += reward
        self._lengths += 1
        return self._finish(ended, info, rollout, t) if 1 in ended.tobytes() else {}  # a third of any()'s cost

    def _finish(self, ended: Any, info: dict[str, Any], rollout: Rollout | None, t: int) -> dict[int, Episode]:
        envs = np.flatnonzero(ended)
        if rollout is not None:
            rollout.write_final(t, envs, "obs", info["final_obs"])
            for name in self._beside:
                rollout.write_final(t, envs, name, info[f"final_{name}"])
        final_info = info.get("final_info", {})
        episodes = {
            i: Episode(float(np.mean(self._returns[i])), int(self._lengths[i]), final_info.get(i, {}))
            for i in envs.tolist()
            if INTERRUPTED not in final_info.get(i, {})  # cut by a crash: its return says nothing about the policy
        }
        self._returns[envs] = 0.0
        self._lengths[envs] = 0
        if self._hidden is not None:
            rows = torch.as_tensor(envs, device=self.device)
            tree_map(lambda leaf: leaf.index_fill_(0, rows, 0.0), self._hidden)
        return episodes

    def _storage(self, steps: int, old: Rollout | None = None) -> Rollout:
        """Return storage for so many steps that begins with the rows of `old`."""
        if self.rollout is None or self.rollout.num_steps != steps:
            new = Rollout({**self.spaces.fields(), **self.fields}, steps, self.env.num_envs)
            if old is not None:
                new.copy_from(old)
            self.rollout = new
        return self.rollout

    @torch.no_grad()
    def evaluate(
        self, episodes: int, seed: int, on_step: Callable[[], None] = lambda: None, max_steps: int | None = None
    ) -> Evaluation:
        """Play `episodes` fresh episodes in evaluation mode. The same seed gives the same episodes.

        `on_step` is called at the start and after each step; an exception in it ends the evaluation. Every environment
        plays an equal number of episodes, because the first ones to end are short. Episodes are cut after `max_steps`
        steps, by default after those of `default_eval_steps`. The next `collect` starts new episodes.
        """
        num = self.env.num_envs
        most = max_steps or default_eval_steps(self.env.max_episode_steps)
        self.policy.bind_env(self.env)
        self.rng.manual_seed(derive_seed(seed, "evaluation"))
        owed = [episodes // num + (i < episodes % num) for i in range(num)]
        played: list[list[Episode]] = [[] for _ in owed]
        rounds = 0
        try:
            while any(owed):
                # an environment can't be reset alone: after a cut it waits until all others are done
                rounds += 1
                again = () if rounds == 1 else (rounds,)
                self._start(derive_seed(seed, "evaluation environments", *again))
                on_step()
                waiting = [read_count == 0 for read_count in owed]
                while not all(waiting):
                    ended = self._step(Phase.EVAL, None, 0)
                    if most is not None and self._lengths.max() >= most:
                        ended |= {i: self._cut(i) for i in np.flatnonzero(self._lengths >= most).tolist()}
                    for i, episode in ended.items():
                        if not waiting[i]:
                            played[i].append(episode)
                            owed[i] -= 1
                            waiting[i] = episode.cut or owed[i] == 0
                    on_step()
        finally:
            self._obs = None
        return Evaluation([episode for mine in played for episode in mine])

    def _cut(self, i: int) -> Episode:
        return Episode(float(np.mean(self._returns[i])), int(self._lengths[i]), {}, cut=True)

    @property
    def max_episode_steps(self) -> int | None:
        return self.env.max_episode_steps

    @property
    def logged_info_keys(self) -> tuple[str, ...]:
        return self.env.logged_info_keys

    @property
    def num_env_restarts(self) -> int:
        return self.env.num_env_restarts

    @property
    def longest_running(self) -> int:
        return 0 if self._obs is None else int(self._lengths.max())

    def close(self) -> None:
        self.env.close()

    def copy_policy(self) -> None:
        self.policy = copy.deepcopy(self.policy)

    def load_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
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
        self.env_steps = read_count("the actor", state, "env_steps")
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
