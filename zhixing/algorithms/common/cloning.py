"""What learners that clone somebody share (bc, dagger): the network, its policy and its loss."""

from __future__ import annotations

from torch import Tensor

from zhixing.config import DataConfig
from zhixing.core.batch import Batch
from zhixing.core.policy import Policy
from zhixing.core.spaces import Spaces
from zhixing.nets.critics import DeterministicActor, MaxLikelihoodActor, check_box
from zhixing.nets.policies import DeterministicPolicy, StochasticPolicy
from zhixing.nets.torso import NetFactory

Clone = MaxLikelihoodActor | DeterministicActor


def make_clone(
    spaces: Spaces, cfg: DataConfig, net: NetFactory | None, likelihood: bool = False
) -> tuple[Clone, Policy]:
    """Of choices their chances; of continuous actions the best, or with `likelihood` normals around it."""
    if not spaces.discrete:
        check_box(spaces, cfg.algorithm)
    if spaces.discrete or likelihood:
        likely = MaxLikelihoodActor(spaces, cfg, net)
        return likely, StochasticPolicy(spaces, likely)
    best = DeterministicActor(spaces, cfg, net)
    return best, DeterministicPolicy(spaces, best, 0.0)


def cloning_loss(actor: Clone, batch: Batch, action: Tensor) -> Tensor:
    """How unlike `action [B,...]` the clone would act."""
    if isinstance(actor, DeterministicActor):
        return (actor(batch.obs) - action).square().mean()
    return -actor(batch.obs, batch.mask if "mask" in batch else None).log_prob(action).mean()
