"""The two functions of the shortest interface: `train` and `evaluate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from zhixing import algorithms, config
from zhixing.collect.collector import Evaluator
from zhixing.collect.evaluation import Evaluation, default_eval_steps
from zhixing.core.learner import Learner
from zhixing.errors import UserError
from zhixing.training.builders import build_evaluation_env, build_evaluator
from zhixing.training.callbacks import Callback
from zhixing.training.data import NO_ENV
from zhixing.training.matches import MatchEvaluator, make_game
from zhixing.training.resolve import resolve_device
from zhixing.training.run_folder import RunFolder, weights_must_fit
from zhixing.training.session import Session


def train(
    algorithm: str,
    env: Any = None,
    *,
    out: str | Path | None = None,
    callbacks: Callback | Sequence[Callback] = (),
    quiet: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """Train and return the run's result: `zx.train("ppo", env="CartPole-v1", seed=0)`.

    `env` is a name, a class, a function that makes an environment, or an environment. A dataset names its own:
    `zx.train("iql", dataset="recorded")`. `net` may be a class of networks.
    """
    if env is not None:
        settings["env"] = env
    from zhixing.experiments import auto

    cfg = auto.build([], config.from_keywords({"algorithm": algorithm, **settings}))
    return Session(cfg, out, callbacks, quiet=quiet).run()


def evaluate(
    run: str | Path,
    episodes: int = 100,
    seed: int = 0,
    checkpoint: str = "last",
    against: str | None = None,
    *,
    max_steps: int | None = None,
    trust: bool = False,
    env: Any = None,
    net: Any = None,
) -> Evaluation:
    """Play fresh episodes with a run's agent.

    In games `against` names an opponent: random, perfect, mcts, mcts:SIMULATIONS or another run. Episodes are cut after
    `max_steps`, by default after the run's `eval_max_steps`. With `trust` the code that the run names is imported.
    `env` and `net` are classes or functions to use if it can't be imported.
    """
    folder = RunFolder.open(run)
    cfg = resolve_device(folder.read_config(trust, env, net))
    torch.set_num_threads(int(cfg.num_threads) if cfg.num_threads != "auto" else 1)
    if cfg.env.name == NO_ENV:
        raise UserError(f"{run} was trained without an environment; train with --env NAME to evaluate in it")
    with folder.restricted():
        vector = build_evaluation_env(cfg, folder)
    try:
        with folder.restricted():
            learner: Learner = algorithms.get(cfg.algorithm).make(cfg, vector.spaces, torch.device(cfg.device))
        agent = folder.load_agent(checkpoint)
        with weights_must_fit(folder):
            learner.policy.load_state_dict(agent["policy"])
        evaluator: Evaluator | None = None
        if against is not None:
            evaluator = MatchEvaluator(make_game(cfg.env.name), learner.policy, against)
        else:
            evaluator = build_evaluator(cfg, learner.policy, folder, env=vector)
        assert evaluator is not None
        most = max_steps or cfg.eval_max_steps or default_eval_steps(vector.max_episode_steps, agent["longest_episode"])
        evaluation = evaluator.evaluate(episodes, seed, max_steps=most)
    finally:
        vector.close()
    return replace(evaluation, references=folder.read_references())
