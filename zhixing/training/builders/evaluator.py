"""Build the evaluator of a run."""

from __future__ import annotations

from zhixing.collectors.actor import Actor
from zhixing.collectors.collector import Evaluator
from zhixing.config import RunConfig, SearchConfig
from zhixing.core.policy import Policy
from zhixing.envs import VectorEnv
from zhixing.offline import Dataset
from zhixing.search import find_game
from zhixing.training.builders.env import build_evaluation_env
from zhixing.training.data import check_data
from zhixing.training.matches import MatchEvaluator
from zhixing.training.resolve import NO_ENV
from zhixing.training.run_folder import RunFolder


def build_evaluator(
    cfg: RunConfig,
    policy: Policy,
    folder: RunFolder | None,
    *,
    data: Dataset | None = None,
    env: VectorEnv | None = None,
) -> Evaluator | None:
    """Build the evaluator: matches for tree search in board games, otherwise an actor.

    `env` replaces the evaluation environments. Their spaces must equal those of `data`. Returns None for a run without
    an environment (`--env none`).
    """
    if cfg.env.name == NO_ENV:
        return None
    if isinstance(cfg, SearchConfig) and (game := find_game(cfg.env.name, cfg.env.options)) is not None:
        return MatchEvaluator(game, policy, cfg.opponent or "random")
    env = env or build_evaluation_env(cfg, folder)
    try:
        if data is not None:
            check_data(data, env.spaces, cfg.env.name)
        return Actor(policy, env, device=cfg.device)
    except BaseException:
        env.close()
        raise
