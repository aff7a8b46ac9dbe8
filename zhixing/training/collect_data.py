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
from zhixing.training.agent import Agent, load_state, open_source, restricted
from zhixing.training.data import gather_steps
from zhixing.training.run_folder import RunPath, weights_must_fit

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


def collect(
    run: RunPath | Agent,
    out: str | os.PathLike[str],
    steps: int = 10_000,
    *,
    noise: float = 0.0,
    explore: bool = False,
    replay: bool = False,
    seed: int = 0,
    checkpoint: str | int = "last",
    max_steps: int | None = None,
    references: Mapping[str, float] | None = None,
    trust: bool = False,
    env: Any = None,
    net: Any = None,
) -> Dataset:
    """Record a dataset with a run's agent: `zx.collect(run, "data", steps=50_000)`.

    Args:
        run: Run folder, the result of a run, the name of an agent in `zhixing zoo`, or an agent.
        out: New folder, or `minari:NAME-v0`.
        steps: Steps to record, summed over all episodes.
        noise: Standard deviation of action noise; for discrete actions, the probability of a random action.
        explore: Explore as at the end of training.
        replay: Export the run's replay buffer instead of new steps.
        seed: Seed of the episodes.
        checkpoint: `last` for the final weights, `best` for the best evaluation, or the step of a checkpoint.
        max_steps: Maximum steps per episode; by default the run's `eval_max_steps`.
        references: Mean returns of a `random` and an `expert` policy, to store in the dataset.
        trust: Allow the import of code that the run names.
        env: Class or function to use if the run's environment can't be imported by name.
        net: Class to use if the run's network can't be imported by name.
    """
    out = os.fspath(out)
    if not replay:
        arguments: dict[str, Any] = {"noise": noise, "explore": explore, "seed": seed, "checkpoint": checkpoint}
        arguments |= {"max_steps": max_steps, "references": references}
        return collect_from_agent(run, out, steps, **arguments, trust=trust, env=env, net=net)
    if isinstance(run, Agent):
        raise UserError("an agent has no replay buffer; pass the run, or record new steps with replay=False")
    return export_replay(run, out, references=references, trust=trust, env=env, net=net)


def collect_from_agent(
    run: RunPath | Agent,
    out: str,
    steps: int,
    *,
    noise: float = 0.0,
    explore: bool = False,
    seed: int = 0,
    checkpoint: str | int = "last",
    references: Mapping[str, float] | None = None,
    max_steps: int | None = None,
    trust: bool = False,
    env: Any = None,
    net: Any = None,
) -> Dataset:
    """Record `steps` steps of an agent in fresh episodes to the dataset `out`.

    Episodes are truncated after `max_steps`, by default the run's `eval_max_steps`. The dataset then stores this as the
    environment's time limit.
    """
    cfg, folder = open_source(run, trust, env, net)
    if not out.startswith(minari_data.PREFIX):
        out = os.path.abspath(out)  # an environment may change the working directory
    state, options = load_state(run, folder, checkpoint), dict(cfg.env.options)
    with restricted(folder):
        vector = envs.make_small_vector(envs.RegisteredEnv(cfg.env.name, options), NUM_ENVS, cfg.vector)
    try:
        time_limit = vector.max_episode_steps
        step_limit = max_steps or cfg.eval_max_steps or default_eval_steps(time_limit, state["longest_episode"])
        with restricted(folder):
            if step_limit is not None and (time_limit is None or step_limit < time_limit):
                vector.close()
                options[OPTION] = step_limit
                vector = envs.make_small_vector(envs.RegisteredEnv(cfg.env.name, options), NUM_ENVS, cfg.vector)
            policy = algorithms.get(cfg.algorithm).make(cfg, vector.spaces, "cpu").policy
        with weights_must_fit(folder):
            policy.load_state_dict(state["policy"])
        actor = Actor(NoisyPolicy(policy, noise, explore, cfg.env_steps), vector, seed=seed)
        mode = (" exploring" if explore else "") + (f" with noise {noise:g}" if noise else "")
        note = f"{cfg.algorithm}{'' if folder is None else f' of {folder.path.name}'}{mode}"
        return collect_from_actor(
            actor, out, steps, env=cfg.env.name, options=options, note=note, references=references
        )
    finally:
        vector.close()


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


def export_replay(
    run: RunPath, out: str, *, references: Mapping[str, float] | None = None, **resume_arguments: Any
) -> Dataset:
    """Write the steps in a run's replay buffer to the dataset `out`, oldest first.

    `resume_arguments` are those of `Session.resume`.
    """
    from zhixing.training.session import Session

    given = {name: value for name, value in resume_arguments.items() if value is not None}
    session = Session.resume(run, quiet=True, **given)
    try:
        cfg = session.cfg
        if not session.loop.has_buffer or session.data is not None:
            reason = "it was trained on a dataset" if session.data is not None else f"{cfg.algorithm} doesn't use one"
            raise UserError(
                f"{os.fspath(run)} has no replay buffer to export, because {reason}; record new steps without --replay"
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
