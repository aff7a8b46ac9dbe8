"""The learner of a run."""

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
    """Make the learner, with its demonstrations, expert and further learner processes, if it has any.

    A resumed run doesn't load the weights that `init_from` names: its checkpoint replaces them.
    """
    device = torch.device(cfg.device)
    learner = algorithms.get(cfg.algorithm).make(cfg, spaces, device)
    if isinstance(learner, LearnsFromDemonstrations):
        learner.set_demonstrations(load_demonstrations(cfg, spaces).to(device))
    if isinstance(learner, LearnsFromExpert):
        learner.set_expert(load_expert(cfg, spaces).to(device))
    if cfg.init_from is not None and not resumed:
        start = RunFolder.open(cfg.init_from)
        with weights_must_fit(start):
            learner.load_networks(start.load()["loop"]["learner"])
    if cfg.distributed.servers:
        check_servers(cfg, learner)
    if cfg.distributed.learners > 1:
        check_learners(cfg, learner)
        learner.executor = LearnerGroup(learner, cfg, spaces, folder.path)
    return learner
