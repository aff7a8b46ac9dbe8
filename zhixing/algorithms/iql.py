"""IQL (Kostrikov et al., 2022).   L_V = E[|τ - 1(Q' < V)| (Q'(s, a) - V(s))²],   y = r + γ^k (1 - terminated) V(s')

V is so the τ-expectile of Q', the least of the target critics, over recorded actions, and the actor imitates these by
advantage: max_π E_{s,a ~ data}[log π(a|s) exp(β (Q'(s, a) - V(s)))]. No loss asks for the value of an action that
wasn't taken, of which nothing is known.
Differs from the paper: gradients of value, critics and actor are taken at the same weights, no dropout, and the
choice among discrete actions is learned the same way.
"""

from __future__ import annotations

import copy
import math
from typing import Annotated

import torch
from gymnasium.spaces import Discrete
from torch import Tensor

from zhixing.algorithms import register
from zhixing.config import Fraction, Group, NonNegative, OffPolicyActorCriticConfig, Positive, PositiveFloat
from zhixing.core.batch import Batch
from zhixing.core.learner import Gradients, Learner
from zhixing.core.optimizer import Average
from zhixing.core.spaces import Spaces
from zhixing.core.tree import Tree
from zhixing.nets.critics import Critics, MaxLikelihoodActor, StateValue, check_box
from zhixing.nets.policies import StochasticPolicy
from zhixing.nets.torso import NetFactory
from zhixing.ops.losses import advantage_weight, expectile_loss, weighted_mean
from zhixing.ops.returns import td_target


class IQLConfig(OffPolicyActorCriticConfig):
    critics: Annotated[Positive, Group.NETWORK] = 2
    """Number of critics; targets use the smallest estimate."""
    expectile: Fraction = 0.7
    """Expectile of the value loss; 0.5 is the mean over recorded actions, near 1 their maximum."""
    beta: NonNegative = 3.0
    """Inverse temperature of the weights exp(beta * advantage); 0 is behavior cloning."""
    max_weight: PositiveFloat = 100.0
    """Upper bound of the weight of a recorded action."""
    actor_lr_decay: bool = True
    """Anneal the actor's learning rate to zero over the run along a cosine."""


@register("iql", "learns the value of the better recorded actions and imitates these")
class IQL(Learner):
    settings = IQLConfig
    metrics = ("critic_loss", "value_loss", "actor_loss", "q_mean", "value_mean", "weight_mean", "grad_norm")

    def __init__(
        self, cfg: IQLConfig, spaces: Spaces, device: torch.device | str = "cpu", net: NetFactory | None = None
    ) -> None:
        if not isinstance(spaces.action, Discrete):
            check_box(spaces, cfg.algorithm)
        super().__init__(cfg, spaces, device)
        self.cfg = cfg
        with self.building():
            self.actor = MaxLikelihoodActor(spaces, cfg, net).to(self.device)
            self.critics = Critics(spaces, cfg, net, cfg.critics).to(self.device)
            self.state_value = StateValue(spaces, cfg, net).to(self.device)
        self.actor_lr = cfg.actor_lr or cfg.lr
        self.actor_optimizer = self.make_optimizer(self.actor.parameters(), self.actor_lr)
        self.critic_optimizer = self.make_optimizer(self.critics.parameters(), cfg.lr)
        self.value_optimizer = self.make_optimizer(self.state_value.parameters(), cfg.lr)
        self.target = copy.deepcopy(self.critics)
        self.follow = Average(self.target, self.critics)
        self.policy = StochasticPolicy(spaces, self.actor)

    def set_progress(self, fraction: float) -> None:
        if self.cfg.actor_lr_decay:
            self.actor_optimizer.lr = self.actor_lr * 0.5 * (1.0 + math.cos(math.pi * fraction))

    def value_loss(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Also returns the advantages of the actions taken and the mean value."""
        with torch.no_grad():
            q = self.target.q_of_actions(batch.obs, batch.action).amin(0)
        value = self.state_value(batch.obs)
        advantage = q - value  # [B]
        return (
            weighted_mean(expectile_loss(advantage, self.cfg.expectile), batch),
            advantage.detach(),
            value.detach().mean(),
        )

    @torch.no_grad()
    def target_value(self, batch: Batch) -> Tensor:
        return td_target(batch, self.state_value(batch.next_obs))

    def critic_loss(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Also returns the errors, for priorities, and the mean value."""
        q = self.critics.q_of_actions(batch.obs, batch.action)  # [K,B]
        error = q - self.target_value(batch)
        return weighted_mean(error.square().sum(0), batch), error.detach().abs().mean(0), q.detach().mean()

    def actor_loss(self, batch: Batch, advantage: Tensor) -> tuple[Tensor, Tensor]:
        """Also returns the weights of the actions taken."""
        weight = advantage_weight(advantage, self.cfg.beta, self.cfg.max_weight)
        policy = self.actor(batch.obs, batch.mask if "mask" in batch else None)
        return -weighted_mean(weight * policy.log_prob(batch.action), batch), weight

    def gradients(self, batch: Batch) -> Gradients:
        value_loss, advantage, value_mean = self.value_loss(batch)
        critic_loss, error, q_mean = self.critic_loss(batch)
        actor_loss, weight = self.actor_loss(batch, advantage)
        found = {
            "value_optimizer": self.value_optimizer.gradient(value_loss),
            "critic_optimizer": self.critic_optimizer.gradient(critic_loss),
            "actor_optimizer": self.actor_optimizer.gradient(actor_loss),
        }
        metrics = {"critic_loss": critic_loss.detach(), "value_loss": value_loss.detach()}
        metrics |= {"actor_loss": actor_loss.detach(), "q_mean": q_mean, "value_mean": value_mean}
        return Gradients(found, metrics | {"weight_mean": weight.mean()}, error)

    def after_step(self) -> None:
        self.follow.move(self.cfg.tau)

    def value(self, obs: Tree) -> Tensor:
        return self.state_value(obs)
