"""IQL (Kostrikov et al., 2022).   L_V = E[|τ - 1(Q' < V)| (Q'(s, a) - V(s))²],   y = r + γ^k (1 - terminated) V(s')

V is the τ-expectile of Q' over recorded actions, where Q' is the minimum of the target critics. The actor imitates the
actions, weighted by advantage: max_π E_{s,a ~ data}[log π(a|s) exp(β (Q'(s, a) - V(s)))]. No loss evaluates an action
that isn't in the data.
Differs from the paper: no dropout; discrete actions are supported.
"""

from __future__ import annotations

import copy
from typing import Annotated

import torch
from gymnasium.spaces import Discrete
from torch import Tensor

from zhixing.algorithms import register
from zhixing.config import Fraction, Group, NonNegative, OffPolicyActorCriticConfig, Positive, PositiveFloat, Schedule
from zhixing.core.batch import Batch
from zhixing.core.learner import Learner, Update, train_step
from zhixing.core.optimizer import TargetUpdater
from zhixing.core.spaces import Spaces
from zhixing.core.tree import Tree
from zhixing.nets.critics import Critics, MaxLikelihoodActor, StateValue, check_box
from zhixing.nets.policies import StochasticPolicy
from zhixing.nets.torso import NetFactory
from zhixing.ops.losses import advantage_weight, expectile_loss, weighted_mean
from zhixing.ops.returns import td_target


class IQLConfig(OffPolicyActorCriticConfig):
    algorithm: str = "iql"
    critics: Annotated[Positive, Group.NETWORK] = 2
    """Number of critics; targets use the smallest estimate."""
    expectile: Fraction = 0.7
    """Expectile of the value loss; 0.5 estimates the mean value of recorded actions, near 1 their maximum."""
    beta: NonNegative = 3.0
    """Inverse temperature of the weights exp(beta * advantage); 0 is behavior cloning."""
    max_weight: PositiveFloat = 100.0
    """Upper bound of the weight of a recorded action."""
    actor_lr_schedule: Schedule = "cosine"
    """Actor's learning rate over the budget: constant, linear or cosine to zero, or your.module:function."""


@register("iql", "offline value learning by expectile regression, with advantage-weighted cloning")
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
        with self.seeded_init():
            self.actor = MaxLikelihoodActor(spaces, cfg, net).to(self.device)
            self.critics = Critics(spaces, cfg, net, cfg.critics).to(self.device)
            self.state_value = StateValue(spaces, cfg, net).to(self.device)
        self.actor_optimizer = self.make_optimizer(
            self.actor.parameters(), cfg.actor_lr or cfg.lr, schedule=cfg.actor_lr_schedule
        )
        self.critic_optimizer = self.make_optimizer(self.critics.parameters(), cfg.lr)
        self.value_optimizer = self.make_optimizer(self.state_value.parameters(), cfg.lr)
        self.target_critics = copy.deepcopy(self.critics)
        self.target_updater = TargetUpdater((self.target_critics, self.critics))
        self.policy = StochasticPolicy(spaces, self.actor)

    @torch.no_grad()
    def target_q(self, batch: Batch) -> Tensor:
        """Return the minimum of the target critics for the recorded actions `[B]`."""
        return self.target_critics.q_of_actions(batch.obs, batch.action).amin(0)

    def value_loss(self, batch: Batch, q: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss and the mean value."""
        value = self.state_value(batch.obs)
        return weighted_mean(expectile_loss(q - value, self.cfg.expectile), batch), value.detach().mean()

    def actor_loss(self, batch: Batch, q: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss and the weights of the recorded actions `[B]`."""
        with torch.no_grad():
            advantage = q - self.state_value(batch.obs)
        weight = advantage_weight(advantage, self.cfg.beta, self.cfg.max_weight)
        policy = self.actor(batch.obs, batch.get("mask"))
        return -weighted_mean(weight * policy.log_prob(batch.action), batch), weight

    @torch.no_grad()
    def target_value(self, batch: Batch) -> Tensor:
        return td_target(batch, self.state_value(batch.next_obs))

    def critic_loss(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Return the loss, the absolute TD errors `[B]` and the mean value."""
        q = self.critics.q_of_actions(batch.obs, batch.action)  # [K,B]
        td_error = q - self.target_value(batch)
        return weighted_mean(td_error.square().sum(0), batch), td_error.detach().abs().mean(0), q.detach().mean()

    @train_step
    def update(self, batch: Batch) -> Update:
        q = self.target_q(batch)
        value_loss, value_mean = self.value_loss(batch, q)
        self.value_optimizer.step(value_loss)
        actor_loss, weight = self.actor_loss(batch, q)  # actor and critics use the value just updated
        self.actor_optimizer.step(actor_loss)
        critic_loss, td_error, q_mean = self.critic_loss(batch)
        grad_norm = self.critic_optimizer.step(critic_loss)
        self.target_updater.polyak_update(self.cfg.tau)
        metrics = {"critic_loss": critic_loss, "value_loss": value_loss, "actor_loss": actor_loss, "q_mean": q_mean}
        metrics |= {"value_mean": value_mean, "weight_mean": weight.mean(), "grad_norm": grad_norm}
        return Update(metrics, td_error)

    def value(self, obs: Tree) -> Tensor:
        return self.state_value(obs)
