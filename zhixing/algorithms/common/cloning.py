"""Behavior cloning, shared by bc and dagger: networks with their policies, and the loss."""

from __future__ import annotations

from torch import Tensor

from zhixing.config import DataConfig
from zhixing.core.batch import Batch
from zhixing.core.policy import Policy
from zhixing.core.spaces import Spaces
from zhixing.errors import UserError
from zhixing.nets.critics import DeterministicActor, MaxLikelihoodActor, check_box
from zhixing.nets.policies import DeterministicPolicy, StochasticPolicy
from zhixing.nets.torso import NetFactory

CloneActor = MaxLikelihoodActor | DeterministicActor


def make_clone(
    spaces: Spaces, cfg: DataConfig, net: NetFactory | None, likelihood: bool = False
) -> tuple[CloneActor, Policy]:
    """Return an actor to fit to an expert's actions, and its policy.

    The actor is stochastic for discrete and composite actions, and with `likelihood` also for continuous ones, else
    deterministic.
    """
    if not spaces.composite and not spaces.discrete:
        check_box(spaces, cfg.algorithm)
    if not spaces.layout.bounded:
        raise UserError(f"{cfg.algorithm} needs bounded actions; this env has {spaces.action}: set finite bounds")
    if spaces.composite or spaces.discrete or likelihood:
        stochastic = MaxLikelihoodActor(spaces, cfg, net)
        return stochastic, StochasticPolicy(spaces, stochastic)
    deterministic = DeterministicActor(spaces, cfg, net)
    return deterministic, DeterministicPolicy(spaces, deterministic, noise=0.0)


def cloning_loss(actor: CloneActor, batch: Batch, action: Tensor) -> Tensor:
    """Return the squared error of a deterministic actor, or the negative log-likelihood of `action [B,...]`."""
    if isinstance(actor, DeterministicActor):
        return (actor(batch.obs) - action).square().mean()
    return -actor(batch.obs, batch.get("mask")).log_prob(action).mean()
