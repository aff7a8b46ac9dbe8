"""REINFORCE (Williams, 1992).   ∇ = E[∇ log π(a|s) (G - b(s))],   G = Σ γ^k r_k to the end of the episode

b is a learned baseline, or zero. With a baseline, the returns of truncated episodes, and of those that the rollout cuts
off, bootstrap from it. Without one, steps whose episode doesn't end in the rollout are not used, and the return of a
truncated episode is the sum of its rewards up to the truncation.
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from zhixing.algorithms import register
from zhixing.config import EntropyBonusConfig, Finite, Group, NonNegative, OnPolicyConfig, Positive, PositiveFloat
from zhixing.core.batch import Batch
from zhixing.core.learner import Learner, Update, train_step
from zhixing.core.spaces import Spaces
from zhixing.core.tree import Tree
from zhixing.nets.actor_critic import ActorCritic, compute_advantages, episode_starts, evaluate_actions, rollout_fields
from zhixing.nets.policies import ActorCriticPolicy
from zhixing.nets.torso import NetFactory
from zhixing.ops.normalize import normalize
from zhixing.ops.returns import gae


class PGConfig(OnPolicyConfig, EntropyBonusConfig):
    algorithm: str = "pg"
    num_envs: Positive = 8
    baseline: bool = True
    """Subtract a learned state value from returns."""
    lr: PositiveFloat = 3e-3
    value_coef: NonNegative = 0.5
    """Weight of the baseline's value loss."""
    normalize_advantage: bool = True
    """Normalize advantages to zero mean and unit standard deviation per rollout."""
    log_std_init: Annotated[Finite, Group.NETWORK] = 0.0
    """Initial log standard deviation of continuous actions."""


@register("pg", "REINFORCE with or without a baseline")
class PG(Learner):
    settings = PGConfig
    metrics = ("policy_loss", "value_loss", "entropy", "grad_norm", "value_mean")

    def __init__(
        self, cfg: PGConfig, spaces: Spaces, device: torch.device | str = "cpu", net: NetFactory | None = None
    ) -> None:
        super().__init__(cfg, spaces, device)
        self.cfg = cfg
        with self.seeded_init():
            self.net = ActorCritic(spaces, cfg.net, net, log_std=cfg.log_std_init).to(self.device)
        self.policy = ActorCriticPolicy(spaces, self.net)
        self.optimizer = self.make_optimizer(self.net.parameters(), cfg.lr, max_grad_norm=cfg.max_grad_norm)
        self.entropy_coef = self.make_coefficient("entropy_coef", cfg.entropy_coef, cfg.entropy_coef_schedule)

    @property
    def extra_fields(self) -> dict[str, Tree]:
        return rollout_fields(self.policy)

    def value(self, obs: Tree) -> Tensor | None:
        return self.net(obs).value if self.cfg.baseline else None

    def returns(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the returns of a rollout `[T,N]`, and which of them are known."""
        if self.cfg.baseline:
            advantage = compute_advantages(self.net, batch, batch.reward, self.cfg.gamma, 1.0)
            return advantage + batch.value, torch.ones_like(batch.terminated)
        zero = torch.zeros_like(batch.reward)
        ended = batch.terminated | batch.truncated
        known = ended.flip(0).cummax(0).values.flip(0)  # the episode ends at this or a later step
        return gae(batch.reward, zero, zero, batch.terminated, batch.truncated, self.cfg.gamma, 1.0), known

    @train_step
    def gradient_step(self, batch: Batch) -> Update:
        """Update from a rollout `[T,N]` with the `returns` of each step and whether they are `known`."""
        rows = batch if self.net.recurrent else batch.flatten()
        logp, value, entropies = evaluate_actions(self.net, rows)
        advantage = rows.returns - rows.value if self.cfg.baseline else rows.returns
        if self.cfg.normalize_advantage:
            advantage = normalize(advantage, rows.known)
        weight = rows.known / rows.known.sum().clamp_min(1)  # averages over the known steps
        policy_loss = -(weight * logp * advantage).sum()
        value_loss = (weight * (value - rows.returns).square()).sum()
        entropy = entropies.mean()
        loss = policy_loss - self.entropy_coef * entropy
        if self.cfg.baseline:
            loss = loss + self.cfg.value_coef * value_loss
        grad_norm = self.optimizer.step(loss)
        metrics = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy, "grad_norm": grad_norm}
        return Update({**metrics, "value_mean": value.mean()})

    def update(self, batch: Batch) -> Update:
        returns, known = self.returns(batch)
        fields = {name: getattr(batch, name) for name in ("obs", "action", "value", "mask") if name in batch}
        if self.net.recurrent:
            fields |= {"hidden": batch.hidden, "is_first": episode_starts(batch)}
        return self.gradient_step(Batch(**fields, returns=returns, known=known))
