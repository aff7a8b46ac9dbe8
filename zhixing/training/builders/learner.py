"""Build the learner of a run."""

from __future__ import annotations

import torch

from zhixing import algorithms
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
    if cfg.distributed.servers:
        check_servers(cfg, learner)
    if cfg.distributed.learners > 1:
        check_learners(cfg, learner)
        learner.executor = LearnerGroup(learner, cfg, spaces, folder.path)
    return learner
