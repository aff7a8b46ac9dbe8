"""AWAC (Nair et al., 2020).   max_π E_{s,a ~ data}[log π(a|s) exp((Q(s, a) - Q(s, a')) / λ)],   a' ~ π(s)

The targets of the critics are y = r + γ^k (1 - terminated) min_i Q'_i(s', a'), a' ~ π(s'). The actor imitates replayed
actions, weighted by advantage, so the same update works on offline data and afterwards on the actor's own steps. With
discrete actions the expectations over the policy are exact sums.
Differs from the paper: weights are bounded instead of normalized over the batch, advantages use the minimum of the
critics, and the actor has no weight decay.
"""

from __future__ import annotations

import copy
from typing import Annotated

import torch
from gymnasium.spaces import Discrete
from torch import Tensor

from zhixing.algorithms import register
from zhixing.config import Group, OffPolicyActorCriticConfig, Positive, PositiveFloat
from zhixing.core.batch import Batch
from zhixing.core.learner import Learner, Update, train_step
from zhixing.core.optimizer import TargetUpdater
from zhixing.core.spaces import Spaces
from zhixing.core.tree import Tree
from zhixing.nets.critics import Critics, MaxLikelihoodActor, check_box
from zhixing.nets.policies import StochasticPolicy
from zhixing.nets.torso import NetFactory
from zhixing.ops.distributions import Categorical, Distribution
from zhixing.ops.losses import advantage_weight, weighted_mean
from zhixing.ops.returns import td_target


class AWACConfig(OffPolicyActorCriticConfig):
    algorithm: str = "awac"
    critics: Annotated[Positive, Group.NETWORK] = 2
    """Number of critics; targets use the smallest estimate."""
    advantage_lambda: PositiveFloat = 1.0
    """Temperature λ of the weights exp(advantage / λ) of imitated actions; lower is greedier."""
    max_weight: PositiveFloat = 100.0
    """Upper bound of the weight of an imitated action."""


@register("awac", "advantage-weighted actor-critic, offline and then online")
class AWAC(Learner):
    settings = AWACConfig
    metrics = ("critic_loss", "actor_loss", "q_mean", "weight_mean", "grad_norm")

    def __init__(
        self, cfg: AWACConfig, spaces: Spaces, device: torch.device | str = "cpu", net: NetFactory | None = None
    ) -> None:
        if not isinstance(spaces.action, Discrete):
            check_box(spaces, cfg.algorithm)
        super().__init__(cfg, spaces, device)
        self.cfg = cfg
        with self.seeded_init():
            self.actor = MaxLikelihoodActor(spaces, cfg, net).to(self.device)
            self.critics = Critics(spaces, cfg, net, cfg.critics).to(self.device)
        self.actor_optimizer = self.make_optimizer(self.actor.parameters(), cfg.actor_lr or cfg.lr)
        self.critic_optimizer = self.make_optimizer(self.critics.parameters(), cfg.lr)
        self.target_critics = copy.deepcopy(self.critics)
        self.target_updater = TargetUpdater((self.target_critics, self.critics))
        self.policy = StochasticPolicy(spaces, self.actor)

    @torch.no_grad()
    def policy_value(self, critics: Critics, obs: Tree, policy: Distribution) -> Tensor:
        """Return the value of the policy `[B]`: exact for discrete actions, else estimated with one sample."""
        if isinstance(policy, Categorical):
            return (policy.logp.exp() * critics(obs).amin(0)).sum(-1)
        return critics(obs, policy.sample(self.rng)).amin(0)

    @torch.no_grad()
    def target_value(self, batch: Batch) -> Tensor:
        policy = self.actor(batch.next_obs, batch.get("next_mask"))
        return td_target(batch, self.policy_value(self.target_critics, batch.next_obs, policy))

    def critic_loss(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Return the loss, the absolute TD errors `[B]` and the mean value."""
        q = self.critics.q_of_actions(batch.obs, batch.action)  # [K,B]
        td_error = q - self.target_value(batch)
        loss = weighted_mean(0.5 * td_error.square().sum(0), batch)
        return loss, td_error.detach().abs().mean(0), q.detach().mean()

    def actor_loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the loss and the weights of the imitated actions `[B]`."""
        policy = self.actor(batch.obs, batch.get("mask"))
        with torch.no_grad():
            q = self.critics.q_of_actions(batch.obs, batch.action).amin(0)
            advantage = q - self.policy_value(self.critics, batch.obs, policy)
        weight = advantage_weight(advantage, 1.0 / self.cfg.advantage_lambda, self.cfg.max_weight)
        return -weighted_mean(weight * policy.log_prob(batch.action), batch), weight

    @train_step
    def update(self, batch: Batch) -> Update:
        critic_loss, td_error, q_mean = self.critic_loss(batch)
        grad_norm = self.critic_optimizer.step(critic_loss)
        actor_loss, weight = self.actor_loss(batch)  # uses the critics just updated
        self.actor_optimizer.step(actor_loss)
        self.target_updater.polyak_update(self.cfg.tau)
        metrics = {"critic_loss": critic_loss, "actor_loss": actor_loss, "q_mean": q_mean}
        return Update({**metrics, "weight_mean": weight.mean(), "grad_norm": grad_norm}, td_error)

    def value(self, obs: Tree) -> Tensor:
        policy = self.actor(obs)
        if isinstance(policy, Categorical):
            return self.policy_value(self.critics, obs, policy)
        return self.critics(obs, policy.mode()).amin(0)
