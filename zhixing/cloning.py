"""What learners that clone somebody share (bc, dagger): the network, its policy and its loss."""

from __future__ import annotations

from torch import Tensor

from zhixing.batch import Batch
from zhixing.config import DataConfig
from zhixing.nets.body import MakeNet
from zhixing.nets.critics import DeterministicActor, LikelyActor, check_box
from zhixing.policy import DeterministicPolicy, Policy, SampledPolicy
from zhixing.spaces import Spaces

Clone = LikelyActor | DeterministicActor


def make_clone(spaces: Spaces, cfg: DataConfig, net: MakeNet | None, likelihood: bool = False) -> tuple[Clone, Policy]:
    """Of choices their chances; of continuous actions the best, or with `likelihood` normals around it."""
    if not spaces.discrete:
        check_box(spaces, cfg.algorithm)
    if spaces.discrete or likelihood:
        likely = LikelyActor(spaces, cfg, net)
        return likely, SampledPolicy(spaces, likely)
    best = DeterministicActor(spaces, cfg, net)
    return best, DeterministicPolicy(spaces, best, 0.0)


def cloning_loss(actor: Clone, batch: Batch, action: Tensor) -> Tensor:
    """How unlike `action [B,...]` the clone would act."""
    if isinstance(actor, DeterministicActor):
        return (actor(batch.obs) - action).square().mean()
    return -actor(batch.obs, batch.mask if "mask" in batch else None).log_prob(action).mean()
