"""Record datasets: new steps of an agent, or the replay buffer of a run."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zhixing import algorithms, envs, offline
from zhixing.collectors.actor import Actor
from zhixing.collectors.evaluation import default_eval_steps
from zhixing.core.policy import Decision, Phase, Policy
from zhixing.core.spaces import Spaces
from zhixing.core.tree import Tree
from zhixing.envs.vector.step_buffers import Array
from zhixing.envs.wrappers.time_limit import OPTION
from zhixing.errors import UserError
from zhixing.offline import Dataset, Writer, minari_data
from zhixing.training.data import gather_steps
from zhixing.training.run_folder import RunFolder, weights_must_fit

NUM_ENVS = 8
CHUNK_STEPS = 256  # steps per environment between writes


class NoisyPolicy(Policy):
    """Adds action noise to a trained policy.

    `noise` is the standard deviation of normal noise on continuous parts of actions, and the probability that all other
    parts are replaced by random allowed ones. With `explore`, the policy explores as at the end of training.
    """

    def __init__(self, policy: Policy, noise: float, explore: bool, env_steps: int) -> None:
        super().__init__(policy.spaces)
        self.policy, self.noise, self.env_steps = policy, noise, env_steps
        self.phase = Phase.COLLECT if explore else Phase.EVAL

    def bind_env(self, env: envs.VectorEnv) -> None:
        self.policy.bind_env(env)

    def initial_hidden(self, num: int) -> Tree:
        return self.policy.initial_hidden(num)

    def summarize_returns(self, returns: Array, env: int, phase: Phase) -> tuple[float, dict[str, float]]:
        return self.policy.summarize_returns(returns, env, self.phase)

    @property
    def logged_info_keys(self) -> tuple[str, ...]:
        return self.policy.logged_info_keys

    def act(
        self, obs: Tree, hidden: Tree, mask: Tensor | None, phase: Phase, rng: torch.Generator, env_steps: int
    ) -> Decision:
        decision = self.policy.act(obs, hidden, mask, self.phase, rng, self.env_steps)
        return decision._replace(action=self.add_noise(decision.action, mask, rng)) if self.noise else decision

    def add_noise(self, action: Tensor, mask: Tensor | None, rng: torch.Generator) -> Tensor:
        noisy, num_continuous = action, self.spaces.layout.num_continuous
        if num_continuous:
            noisy = (action + self.noise * torch.randn(action.shape, generator=rng)).clamp(-1.0, 1.0)
        if num_continuous < self.spaces.layout.num_columns:
            random = self.random_action(len(action), mask, rng)
            replaced = torch.rand(len(action), generator=rng) < self.noise
            mixed = torch.where(replaced.view(-1, *[1] * (action.ndim - 1)), random, action)
            if not num_continuous:
                return mixed
            noisy = torch.cat([mixed[..., :-num_continuous], noisy[..., -num_continuous:]], -1)
        return noisy


def collect_from_agent(
    run: str | Path,
    out: str,
    steps: int,
    *,
    noise: float = 0.0,
    explore: bool = False,
    seed: int = 0,
    checkpoint: str | int = "last",
    references: Mapping[str, float] | None = None,
    max_steps: int | None = None,
) -> Dataset:
    """Record `steps` steps of a run's agent in fresh episodes to the dataset `out`.

    Episodes are truncated after `max_steps`, by default the run's `eval_max_steps`. The dataset then stores this as the
    environment's time limit.
    """
    folder = RunFolder.open(run)
    cfg = folder.read_config()
    if not out.startswith(minari_data.PREFIX):
        out = os.path.abspath(out)  # an environment may change the working directory
    agent, options = folder.load_agent(checkpoint), dict(cfg.env.options)
    with folder.restricted():
        env = envs.make_small_vector(envs.RegisteredEnv(cfg.env.name, options), NUM_ENVS, cfg.vector)
    try:
        time_limit = env.max_episode_steps
        step_limit = max_steps or cfg.eval_max_steps or default_eval_steps(time_limit, agent["longest_episode"])
        with folder.restricted():
            if step_limit is not None and (time_limit is None or step_limit < time_limit):
                env.close()
                options[OPTION] = step_limit
                env = envs.make_small_vector(envs.RegisteredEnv(cfg.env.name, options), NUM_ENVS, cfg.vector)
            policy = algorithms.get(cfg.algorithm).make(cfg, env.spaces, "cpu").policy
        with weights_must_fit(folder):
            policy.load_state_dict(agent["policy"])
        actor = Actor(NoisyPolicy(policy, noise, explore, cfg.env_steps), env, seed=seed)
        mode = (" exploring" if explore else "") + (f" with noise {noise:g}" if noise else "")
        note = f"{cfg.algorithm} of {folder.path.name}{mode}"
        return collect_from_actor(
            actor, out, steps, env=cfg.env.name, options=options, note=note, references=references
        )
    finally:
        env.close()


def collect_from_actor(
    actor: Actor,
    out: str,
    steps: int,
    *,
    env: str,
    note: str,
    options: Mapping[str, Any] | None = None,
    phase: Phase = Phase.COLLECT,
    references: Mapping[str, float] | None = None,
) -> Dataset:
    """Record `steps` steps of an actor to the dataset `out`, including unfinished episodes at the end."""
    with _open_writer(out, actor.spaces, env, options, references, note, steps) as writer:
        while not writer.full:
            remaining = -(-(steps - len(writer)) // actor.env.num_envs)
            writer.add(actor.collect(steps=min(CHUNK_STEPS, remaining), phase=phase).batch)
    return offline.open(out)


def export_replay(run: str | Path, out: str, *, references: Mapping[str, float] | None = None) -> Dataset:
    """Write the steps in a run's replay buffer to the dataset `out`, oldest first."""
    from zhixing.training.session import Session

    session = Session.resume(run, quiet=True)
    try:
        cfg = session.cfg
        if not session.loop.has_buffer or session.data is not None:
            reason = "it was trained on a dataset" if session.data is not None else f"{cfg.algorithm} doesn't use one"
            raise UserError(
                f"{run} has no replay buffer to export, because {reason}; record new steps without --replay"
            )
        buffer = session.loop.buffer
        index = buffer.ring.indices().reshape(-1, buffer.num_envs)  # [T,N]
        index = index[buffer.ring.is_complete(index, 0).all(1).argmax() :]  # the oldest stacks may lack frames
        note = f"replay of {cfg.algorithm} of {Path(run).name}"
        with _open_writer(out, session.spaces, cfg.env.name, cfg.env.options, references, note) as writer:
            for start in range(0, len(index), CHUNK_STEPS):
                writer.add(gather_steps(buffer.ring, index[start : start + CHUNK_STEPS], session.spaces.fields()))
    finally:
        session.close()
    return offline.open(out)


@contextmanager
def _open_writer(
    out: str,
    spaces: Spaces,
    env: str,
    options: Mapping[str, Any] | None,
    references: Mapping[str, float] | None,
    note: str,
    max_steps: int | None = None,
) -> Iterator[Writer]:
    """Yield a writer of zhixing's format. For `minari:NAME`, convert the result to a Minari dataset at the end."""
    if not out.startswith(minari_data.PREFIX):
        with Writer(out, spaces, env, options, references, note, max_steps) as writer:
            yield writer
        return
    with tempfile.TemporaryDirectory() as folder:
        recorded = Path(folder) / "recorded"
        with Writer(recorded, spaces, env, options, references, note, max_steps) as writer:
            yield writer
        minari_data.write(offline.open(recorded), out.removeprefix(minari_data.PREFIX))
