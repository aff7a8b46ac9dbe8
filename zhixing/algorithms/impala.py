"""IMPALA (Espeholt et al., 2018).   ∇ = E[ρ ∇ log π(a|s) (r + γ v' - V)] - c_v ∇(v - V)² + c_e ∇H

Actors collect with a policy μ that is some updates old. v is the V-trace target, and ρ = min(ρ̄, π(a|s) / μ(a|s))
corrects for the difference between μ and the current policy π. In one process, actors alternate.
Differs from the paper: each update uses the rollout of one actor, with all its environments; rewards aren't clipped;
losses are means, not sums; the default optimizer is Adam.
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor
from torch.nn import functional as F

from zhixing.algorithms import register
from zhixing.config import (
    AsynchronousConfig,
    EntropyBonusConfig,
    Finite,
    Fraction,
    Group,
    NonNegative,
    Positive,
    PositiveFloat,
)
from zhixing.core.batch import Batch
from zhixing.core.learner import Learner, Update, train_step
from zhixing.core.spaces import Spaces
from zhixing.core.tree import Tree
from zhixing.nets.actor_critic import ActorCritic, bootstrap_values, episode_starts, evaluate_actions, rollout_fields
from zhixing.nets.policies import ActorCriticPolicy
from zhixing.nets.torso import NetFactory
from zhixing.ops.normalize import normalize
from zhixing.ops.returns import rollout_boundary, vtrace


class IMPALAConfig(AsynchronousConfig, EntropyBonusConfig):
    algorithm: str = "impala"
    num_envs: Positive = 8
    rollout_steps: Positive = 20
    """Steps per environment in the rollout of one actor."""
    optimizer_eps: PositiveFloat = 1e-5
    rho_bar: PositiveFloat = 1.0
    """Clip of V-trace's importance ratios in TD errors, which determines the fixed point."""
    c_bar: PositiveFloat = 1.0
    """Clip of V-trace's importance ratios in traces, which determines the speed of convergence."""
    trace_lambda: Fraction = 1.0
    """Lambda of the V-trace targets."""
    value_coef: NonNegative = 0.5
    """Weight of the value loss."""
    normalize_advantage: bool = False
    """Normalize advantages to zero mean and unit standard deviation per rollout."""
    normalize_obs: bool = False
    """Normalize observations by their running mean and standard deviation."""
    shared_network: Annotated[bool, Group.NETWORK] = False
    """Share one torso between actor and critic."""
    log_std_init: Annotated[Finite, Group.NETWORK] = 0.0
    """Initial log standard deviation of continuous actions."""


@register("impala", "actor-critic with asynchronous actors and V-trace off-policy correction")
class IMPALA(Learner):
    settings = IMPALAConfig
    metrics = ("policy_loss", "value_loss", "entropy", "ratio", "grad_norm", "value_mean")
    shard_dim = 1  # environments: V-trace needs whole rollouts

    def __init__(
        self, cfg: IMPALAConfig, spaces: Spaces, device: torch.device | str = "cpu", net: NetFactory | None = None
    ) -> None:
        super().__init__(cfg, spaces, device)
        self.cfg = cfg
        with self.seeded_init():
            self.net = ActorCritic(
                spaces,
                cfg.net,
                net,
                shared=cfg.shared_network,
                normalize=cfg.normalize_obs,
                log_std=cfg.log_std_init,
            ).to(self.device)
        self.policy = ActorCriticPolicy(spaces, self.net)
        self.optimizer = self.make_optimizer(self.net.parameters(), cfg.lr, max_grad_norm=cfg.max_grad_norm)
        self.entropy_coef = self.make_coefficient("entropy_coef", cfg.entropy_coef, cfg.entropy_coef_schedule)

    @property
    def extra_fields(self) -> dict[str, Tree]:
        fields = rollout_fields(self.policy)
        del fields["value"]  # V-trace uses values of the current critic
        return fields

    def value(self, obs: Tree) -> Tensor:
        return self.net(obs).value

    @torch.no_grad()
    def add_bootstrap_values(self, batch: Batch) -> Batch:
        """Add the values after boundaries, outside the compiled graph because their number varies."""
        boundary = rollout_boundary(batch)
        values = torch.zeros_like(batch.reward).masked_scatter(boundary, bootstrap_values(self.net, batch, boundary))
        return Batch(**{name: getattr(batch, name) for name in batch.fields}, bootstrap_value=values)

    def targets(self, batch: Batch, log_ratio: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return V-trace targets and advantages of a rollout `[T,N]` under the current policy and critic."""
        cfg = self.cfg
        next_value = torch.where(rollout_boundary(batch), batch.bootstrap_value, torch.cat([value[1:], value[-1:]]))
        ends = batch.terminated, batch.truncated
        return vtrace(
            log_ratio, batch.reward, value, next_value, *ends, cfg.gamma, cfg.trace_lambda, cfg.rho_bar, cfg.c_bar
        )

    @train_step
    def gradient_step(self, batch: Batch) -> Update:
        """Update from a rollout `[T,N]` with `bootstrap_value`."""
        steps, envs = batch.reward.shape
        fields = {name: getattr(batch, name) for name in ("obs", "action", "mask") if name in batch}
        if self.net.recurrent:
            fields |= {"hidden": batch.hidden, "is_first": episode_starts(batch)}
        rows = Batch(**fields) if self.net.recurrent else Batch(**fields).flatten()
        logp, value, entropies = (out.view(steps, envs) for out in evaluate_actions(self.net, rows))
        log_ratio = (logp - batch.logp).detach()
        target, advantage = self.targets(batch, log_ratio, value.detach())
        if self.cfg.normalize_advantage:
            advantage = normalize(advantage)
        policy_loss = -(logp * advantage).mean()
        value_loss = F.mse_loss(value, target)
        entropy = entropies.mean()
        loss = policy_loss + self.cfg.value_coef * value_loss - self.entropy_coef * entropy
        metrics = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}
        metrics["value_mean"] = value.mean()
        return Update({**metrics, "ratio": log_ratio.exp().mean(), "grad_norm": self.optimizer.step(loss)})

    def update(self, batch: Batch) -> Update:
        update = self.gradient_step(self.add_bootstrap_values(batch))
        self.net.update_norm(batch.obs)
        return update
