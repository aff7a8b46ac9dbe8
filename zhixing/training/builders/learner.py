"""Build the learner of a run."""

from __future__ import annotations

import torch

from zhixing import algorithms
from zhixing.algorithms.multi_policy import MultiPolicy
from zhixing.config import RunConfig
from zhixing.core.learner import Learner, LearnsFromDemonstrations, LearnsFromExpert
from zhixing.core.spaces import Spaces
from zhixing.distributed.learner_group import LearnerGroup, check_learners
from zhixing.distributed.parameter_servers import check_servers
from zhixing.training.data import load_demonstrations, load_expert
from zhixing.training.run_folder import RunFolder, weights_must_fit


def build_learner(cfg: RunConfig, spaces: Spaces, folder: RunFolder, *, resumed: bool = False) -> Learner:
    """Build the learner, and load its demonstrations and expert or start its learner processes if it needs them.

    A resumed run doesn't load the weights of `init_from`, because its checkpoint replaces them.
    """
    device = torch.device(cfg.device)
    learner = algorithms.get(cfg.algorithm).make(cfg, spaces, device)
    if isinstance(learner, LearnsFromDemonstrations):
        learner.set_demonstrations(load_demonstrations(cfg, spaces).to(device))
    if isinstance(learner, LearnsFromExpert):
        learner.set_expert(load_expert(cfg, spaces).to(device))
    if cfg.init_from is not None and not resumed:
        source = RunFolder.open(cfg.init_from)
        with weights_must_fit(source):
            learner.load_networks(source.load_networks())
    if isinstance(learner, MultiPolicy) and not resumed:
        _initialize_policies(learner)
    if cfg.distributed.servers:
        check_servers(cfg, learner)
    if cfg.distributed.learners > 1:
        check_learners(cfg, learner)
        learner.executor = LearnerGroup(learner, cfg, spaces, folder.path)
    return learner


def _initialize_policies(learner: MultiPolicy) -> None:
    """Load the weights of policies that start from another run."""
    for name, settings in learner.cfg.policies.items():
        if settings.get("init_from") is None:
            continue
        source, policy_name = RunFolder.open(settings["init_from"]), settings["init_policy"]
        with weights_must_fit(source):
            if name in learner.learners:
                state = source.load_networks()
                learner.learners[name].load_networks(state["learners"][policy_name] if policy_name else state)
            else:
                state = source.load_agent()["policy"]
                prefix = f"policies.{policy_name}." if policy_name else ""
                own = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
                learner.policy.policies[name].load_state_dict(own)
    learner.start_leagues()
