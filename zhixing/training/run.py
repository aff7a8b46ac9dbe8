"""Train, resume and evaluate with one function call: `zx.train`, `zx.resume` and `zx.evaluate`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from zhixing import algorithms, config
from zhixing.collectors.collector import Evaluator
from zhixing.collectors.evaluation import Evaluation, default_eval_steps
from zhixing.config import MultiPolicyConfig, RunConfig
from zhixing.core.learner import Learner
from zhixing.errors import UserError, note
from zhixing.nets.joint_policy import JointPolicy
from zhixing.training.agent import Agent, load_state, open_source, restricted
from zhixing.training.builders import build_evaluation_env, build_evaluator
from zhixing.training.callbacks import Callback
from zhixing.training.collect_data import NoisyPolicy
from zhixing.training.matches import MatchEvaluator, make_game
from zhixing.training.resolve import NO_ENV, resolve_device
from zhixing.training.result import RunResult
from zhixing.training.run_folder import RunPath, weights_must_fit
from zhixing.training.session import Session


def train(
    algorithm: str | type[Learner] | RunConfig,
    env: Any = None,
    *,
    out: str | os.PathLike[str] | None = None,
    callbacks: Callback | Sequence[Callback] = (),
    quiet: bool = False,
    **settings: Any,
) -> RunResult:
    """Train and return the run's result: `zx.train("ppo", env="CartPole-v1", seed=0)`, or `zx.train(cfg)`.

    Args:
        algorithm: Name of an algorithm, a class of learners, or a configuration such as `zx.PPOConfig(...)`.
        env: Name, class, function that returns an environment, or environment object. It may be omitted with a
            configuration, or with a dataset, which names its environment: `zx.train("iql", dataset="recorded")`.
        out: New run folder; by default a folder in `runs`.
        callbacks: Callbacks in addition to the built-in ones.
        quiet: Print no progress.
        settings: Any setting, such as `lr=1e-3` or `net__activation="relu"`. `net` may be a class.
    """
    if env is not None:
        settings["env"] = env
    from zhixing.experiments import auto

    cfg = auto.build([config.as_layer(algorithm)], config.from_keywords(settings))
    return Session(cfg, None if out is None else Path(out), callbacks, quiet=quiet).run()


def resume(
    run: RunPath,
    callbacks: Callback | Sequence[Callback] = (),
    *,
    quiet: bool = False,
    trust: bool = False,
    **overrides: Any,
) -> RunResult:
    """Continue a run from its last checkpoint and return its result: `zx.resume(run, env_steps=200_000)`.

    The arguments are those of `Session.resume`.
    """
    session = Session.resume(run, callbacks, quiet=quiet, trust=trust, **overrides)
    for notice in session.folder.notices:
        note(notice)
    return session.run()


def evaluate(
    run: RunPath | Agent,
    episodes: int = 100,
    seed: int = 0,
    checkpoint: str | int = "last",
    against: RunPath | None = None,
    *,
    stochastic: bool | None = None,
    num_envs: int | None = None,
    max_steps: int | None = None,
    trust: bool = False,
    env: Any = None,
    net: Any = None,
) -> Evaluation:
    """Play fresh episodes with a run's agent.

    Args:
        run: Run folder, the result of a run, the name of an agent in `zhixing zoo`, or an agent.
        episodes: Number of episodes.
        seed: Seed of the episodes; the same seed gives the same episodes.
        checkpoint: `last` for the final weights, `best` for the best evaluation, or the step of a checkpoint.
        against: Opponent in board games: random, perfect, mcts, mcts:SIMULATIONS or another run.
        stochastic: True acts with the exploration of the end of training, False with none; by default as configured.
        num_envs: Number of parallel environments; by default the run's `eval_num_envs`.
        max_steps: Maximum steps per episode; by default the run's `eval_max_steps`.
        trust: Allow the import of code that the run names.
        env: Class or function to use if the run's environment can't be imported by name. An agent without a run, such
            as one of `zx.import_agent`, takes any environment.
        net: Class to use if the run's network can't be imported by name.
    """
    cfg, folder = open_source(run, trust, env, net)
    cfg = _evaluation_config(resolve_device(cfg), stochastic, num_envs)
    torch.set_num_threads(int(cfg.num_threads) if cfg.num_threads != "auto" else 1)
    if cfg.env.name == NO_ENV:
        name = "this agent" if isinstance(run, Agent) else os.fspath(run)
        raise UserError(
            f"{name} was trained without an environment (--env none) and can't be evaluated; train with --env"
        )
    with restricted(folder):
        vector = build_evaluation_env(cfg, folder)
    try:
        with restricted(folder):
            learner: Learner = algorithms.get(cfg.algorithm).make(cfg, vector.spaces, torch.device(cfg.device))
        state = load_state(run, folder, checkpoint)
        with weights_must_fit(folder):
            learner.policy.load_state_dict(state["policy"])
        if isinstance(learner.policy, JointPolicy):
            learner.policy.seating = learner.policy.eval_seating  # exploration acts as in training
        policy = NoisyPolicy(learner.policy, 0.0, True, cfg.env_steps) if stochastic else learner.policy
        evaluator: Evaluator | None = None
        if against is not None:
            if isinstance(policy, JointPolicy):  # the learning policy makes the moves of both players
                policy = policy.alone(policy.main())
            evaluator = MatchEvaluator(make_game(cfg), policy, os.fspath(against))
        else:
            evaluator = build_evaluator(cfg, policy, folder, env=vector)
        assert evaluator is not None
        if stochastic and isinstance(evaluator, MatchEvaluator):
            raise UserError(f"games of {cfg.env.name} are played without exploration; leave out --stochastic")
        step_limit = (
            max_steps or cfg.eval_max_steps or default_eval_steps(vector.max_episode_steps, state["longest_episode"])
        )
        evaluation = evaluator.evaluate(episodes, seed, max_steps=step_limit)
    finally:
        vector.close()
    return evaluation if folder is None else replace(evaluation, references=folder.read_references())


def _evaluation_config(cfg: RunConfig, stochastic: bool | None, num_envs: int | None) -> RunConfig:
    changes: dict[str, Any] = {} if num_envs is None else {"eval_num_envs": num_envs}
    cfg = cfg.model_copy(update=changes)
    return make_greedy(cfg) if stochastic is False else cfg


def make_greedy(cfg: RunConfig) -> RunConfig:
    """Return a configuration whose evaluations take the greedy action."""
    greedy: dict[str, Any] = {"eval_stochastic": False, "eval_epsilon": 0.0}  # the algorithm may have one of these
    if isinstance(cfg, MultiPolicyConfig):
        settings = {
            name: {key: greedy.get(key, value) for key, value in one.items()} for name, one in cfg.policies.items()
        }
        return cfg.model_copy(update={"policies": settings})
    return cfg.model_copy(update={name: value for name, value in greedy.items() if name in type(cfg).model_fields})
