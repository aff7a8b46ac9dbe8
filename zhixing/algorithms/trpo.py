"""TRPO (Schulman et al., 2015).   max E[π(a|s) / π_old(a|s) · A]   subject to   E[KL(π_old, π)] <= δ

The policy moves to θ + √(2δ / gᵀF⁻¹g) F⁻¹g, where g is the gradient and F the Fisher matrix. A line search shortens the
step until the objective improves and the exact KL is at most δ. Truncated episodes bootstrap.
Differs from the paper: advantages are estimated by GAE (Schulman et al., 2016) and normalized; the Fisher matrix is
damped and uses all states, not a tenth of them; the critic is trained with Adam.
"""

from __future__ import annotations

import copy
from typing import Annotated

import torch
from torch import Tensor

from zhixing.algorithms import register
from zhixing.config import Finite, Fraction, Group, NonNegative, OnPolicyConfig, Positive, PositiveFloat
from zhixing.core.batch import Batch
from zhixing.core.learner import Learner, Update, mean_metrics, train_step
from zhixing.core.spaces import Spaces
from zhixing.core.tree import Tree
from zhixing.nets.actor_critic import ActorCritic, rollout_fields
from zhixing.nets.policies import ActorCriticPolicy
from zhixing.nets.rollouts import add_advantages, forward_actor, forward_critic
from zhixing.nets.torso import NetFactory
from zhixing.ops.distributions import Distribution
from zhixing.ops.natural_gradient import (
    assign_flat,
    fisher_vector_product,
    flat_gradient,
    flatten_tensors,
    line_search,
    natural_step,
)
from zhixing.ops.normalize import normalize
from zhixing.ops.policy_gradient import explained_variance, minibatches


class TRPOConfig(OnPolicyConfig):
    algorithm: str = "trpo"
    num_envs: Positive = 8
    max_kl: PositiveFloat = 0.01
    """Maximum KL divergence between policies before and after an update."""
    cg_iterations: Positive = 10
    """Conjugate gradient iterations per update."""
    damping: NonNegative = 0.1
    """Damping added to the diagonal of the Fisher matrix."""
    line_search_tries: Positive = 10
    """Maximum line search steps before the policy update is rejected."""
    line_search_shrink: Fraction = 0.8
    """Factor by which each line search step is shorter than the previous one."""
    lr: PositiveFloat = 1e-3
    """Learning rate of the critic."""
    critic_epochs: Positive = 10
    """Critic passes over each rollout."""
    minibatch_size: Positive = 128
    """Maximum steps per critic minibatch; the rollout is split evenly."""
    max_grad_norm: PositiveFloat | None = None
    """Maximum norm of the critic's gradients; none disables clipping."""
    gae_lambda: Fraction = 0.95
    """Lambda of generalized advantage estimation."""
    normalize_obs: bool = False
    """Normalize observations by their running mean and standard deviation."""
    log_std_init: Annotated[Finite, Group.NETWORK] = 0.0
    """Initial log standard deviation of continuous actions."""


@register("trpo", "natural policy gradient with a trust region")
class TRPO(Learner):
    settings = TRPOConfig
    metrics = (
        "policy_loss",
        "value_loss",
        "entropy",
        "kl",
        "step_fraction",
        "explained_variance",
        "grad_norm",
        "value_mean",
    )

    def __init__(
        self, cfg: TRPOConfig, spaces: Spaces, device: torch.device | str = "cpu", net: NetFactory | None = None
    ) -> None:
        super().__init__(cfg, spaces, device)
        self.cfg = cfg
        with self.seeded_init():
            # not batched, because actor and critic have separate parameters
            self.net = ActorCritic(
                spaces, cfg.net, net, batched=False, normalize=cfg.normalize_obs, log_std=cfg.log_std_init
            ).to(self.device)
        self.policy = ActorCriticPolicy(spaces, self.net)
        self.critic_optimizer = self.make_optimizer(
            self.net.critic_parameters(), cfg.lr, max_grad_norm=cfg.max_grad_norm
        )

    @property
    def extra_fields(self) -> dict[str, Tree]:
        return rollout_fields(self.policy)

    def value(self, obs: Tree) -> Tensor:
        return self.net(obs).value

    def policy_loss(self, policy: Distribution, data: Batch) -> Tensor:
        ratio = (policy.log_prob(data.action) - data.logp).exp()
        return -(ratio * data.advantage).mean()

    @torch.no_grad()
    def measure(self, old: Distribution, data: Batch) -> tuple[Tensor, Tensor]:
        """Return the loss of the current policy and its KL divergence from `old`."""
        policy, _ = forward_actor(self.net, data)
        return self.policy_loss(policy, data), old.kl(policy).mean()

    def policy_step(self, data: Batch) -> dict[str, Tensor]:
        """Move the policy within the trust region, or leave it if the line search accepts no step."""
        cfg, parameters = self.cfg, [p for p in self.net.actor_parameters() if p.requires_grad]
        with torch.no_grad():
            old, _ = forward_actor(copy.deepcopy(self.net), data)  # a copy, since the std of a Gaussian is a parameter
        policy, _ = forward_actor(self.net, data)
        loss = self.policy_loss(policy, data)
        fisher = fisher_vector_product(old.kl(policy).mean(), parameters, cfg.damping)
        step = -natural_step(fisher, flat_gradient(loss, parameters), cfg.max_kl, cfg.cg_iterations)

        def accepts(weights: Tensor) -> bool:
            assign_flat(parameters, weights)
            new_loss, kl = self.measure(old, data)
            return bool((new_loss < loss) & (kl <= cfg.max_kl))  # False for NaN

        start = flatten_tensors(parameters).detach()
        weights, fraction = line_search(accepts, start, step, cfg.line_search_shrink, cfg.line_search_tries)
        assign_flat(parameters, weights)
        self.updates += 1
        new_loss, kl = self.measure(old, data)
        return {
            "policy_loss": new_loss,
            "entropy": old.entropy().mean().detach(),
            "kl": torch.where(step.isfinite().all(), kl, torch.nan),  # a non-finite step is reported, never taken
            "step_fraction": kl.new_tensor(fraction),
        }

    @train_step
    def critic_step(self, batch: Batch) -> Update:
        """Update the critic from a minibatch: `[B]`, or `[T,n]` for recurrent networks."""
        value_loss = (forward_critic(self.net, batch) - batch.returns).square().mean()
        return Update({"value_loss": value_loss, "grad_norm": self.critic_optimizer.step(value_loss)})

    def update(self, batch: Batch) -> Update:
        data = add_advantages(self.net, batch, batch.reward, self.cfg.gamma, self.cfg.gae_lambda)
        rows = data if self.net.recurrent else data.flatten()
        metrics = self.policy_step(rows.replace(advantage=normalize(rows.advantage)))
        updates = [
            self.critic_step(minibatch)
            for _ in range(self.cfg.critic_epochs)
            for minibatch in minibatches(data, self.cfg.minibatch_size, self.rng, self.net.recurrent)
        ]
        self.net.update_norm(batch.obs)  # after the epochs, so ratios compare policies with equal statistics
        metrics |= mean_metrics(updates)
        metrics["explained_variance"] = explained_variance(data.value, data.returns)
        metrics["value_mean"] = data.value.mean()
        return Update(metrics)
