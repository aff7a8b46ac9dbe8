"""AWAC (Nair et al., 2020).   max_π E_{s,a ~ data}[log π(a|s) exp((Q(s, a) - Q(s, a')) / λ)],   a' ~ π(s)

The critics learn y = r + γ^k (1 - terminated) min_i Q'_i(s', a'), a' ~ π(s'): what the policy itself is worth. The
actor never leaves what was done before, and so learns from recorded experience first and from its own afterwards.
With discrete actions the expectations over the policy are exact sums.
Differs from the paper: weights are bounded instead of normalised over the batch, advantages are of the least of the
critics, the actor's weights don't decay, and gradients of actor and critics are taken at the same weights.
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
from zhixing.core.learner import Gradients, Learner
from zhixing.core.optimizer import Average
from zhixing.core.spaces import Spaces
from zhixing.core.tree import Tree
from zhixing.nets.critics import Critics, MaxLikelihoodActor, check_box
from zhixing.nets.policies import StochasticPolicy
from zhixing.nets.torso import NetFactory
from zhixing.ops.distributions import Categorical, Distribution
from zhixing.ops.losses import advantage_weight, weighted_mean
from zhixing.ops.returns import td_target


class AWACConfig(OffPolicyActorCriticConfig):
    critics: Annotated[Positive, Group.NETWORK] = 2
    """Number of critics; targets use the smallest estimate."""
    advantage_lambda: PositiveFloat = 1.0
    """Temperature of the weights exp(advantage / temperature) of recorded actions; lower is greedier."""
    max_weight: PositiveFloat = 100.0
    """Upper bound of the weight of a recorded action."""


@register("awac", "imitates actions by how much better they are than its own; offline, then online")
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
        with self.building():
            self.actor = MaxLikelihoodActor(spaces, cfg, net).to(self.device)
            self.critics = Critics(spaces, cfg, net, cfg.critics).to(self.device)
        self.actor_optimizer = self.make_optimizer(self.actor.parameters(), cfg.actor_lr or cfg.lr)
        self.critic_optimizer = self.make_optimizer(self.critics.parameters(), cfg.lr)
        self.target = copy.deepcopy(self.critics)
        self.follow = Average(self.target, self.critics)
        self.policy = StochasticPolicy(spaces, self.actor)

    @torch.no_grad()
    def worth(self, critics: Critics, obs: Tree, policy: Distribution) -> Tensor:
        """Of acting as the policy does `[B]`: exact for choices, else that of one draw."""
        if isinstance(policy, Categorical):
            return (policy.logp.exp() * critics(obs).amin(0)).sum(-1)
        return critics(obs, policy.sample(self.rng)).amin(0)

    @torch.no_grad()
    def target_value(self, batch: Batch) -> Tensor:
        policy = self.actor(batch.next_obs, batch.next_mask if "next_mask" in batch else None)
        return td_target(batch, self.worth(self.target, batch.next_obs, policy))

    def critic_loss(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Also returns the errors, for priorities, and the estimates."""
        q = self.critics.q_of_actions(batch.obs, batch.action)  # [K,B]
        error = q - self.target_value(batch)
        return weighted_mean(0.5 * error.square().sum(0), batch), error.detach().abs().mean(0), q.detach()

    def actor_loss(self, batch: Batch, q: Tensor) -> tuple[Tensor, Tensor]:
        """`q [K,B]` is what the critics say of the actions taken. Also returns the weights of these."""
        policy = self.actor(batch.obs, batch.mask if "mask" in batch else None)
        advantage = q.amin(0) - self.worth(self.critics, batch.obs, policy)
        weight = advantage_weight(advantage, 1.0 / self.cfg.advantage_lambda, self.cfg.max_weight)
        return -weighted_mean(weight * policy.log_prob(batch.action), batch), weight

    def gradients(self, batch: Batch) -> Gradients:
        critic_loss, error, q = self.critic_loss(batch)
        found = {"critic_optimizer": self.critic_optimizer.gradient(critic_loss)}
        actor_loss, weight = self.actor_loss(batch, q)
        found["actor_optimizer"] = self.actor_optimizer.gradient(actor_loss)
        metrics = {"critic_loss": critic_loss.detach(), "actor_loss": actor_loss.detach()}
        metrics |= {"q_mean": q.mean(), "weight_mean": weight.mean()}
        return Gradients(found, metrics, error)

    def after_step(self) -> None:
        self.follow.move(self.cfg.tau)

    def value(self, obs: Tree) -> Tensor:
        policy = self.actor(obs)
        if isinstance(policy, Categorical):
            return self.worth(self.critics, obs, policy)
        return self.critics(obs, policy.mode()).amin(0)
