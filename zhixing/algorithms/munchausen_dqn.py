"""Munchausen DQN (Vieillard et al., 2020).   y = r + α [τ log π(a|s)]_{l..0} + γ^k (1 - terminated) V(s')

π = softmax(Q' / τ) and V(s') = τ log Σ_a exp(Q'(s', a) / τ), both by the target network: what the policy already
prefers is paid a little more, which widens the gaps between actions; l bounds it where the policy is nearly sure of
another.
Differs from the paper: Huber or squared error as a setting, n-step returns (the first action's bonus only) and
prioritized replay as settings, and targets that may follow slowly (`tau`).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zhixing.algorithms import register
from zhixing.algorithms.dqn import Losses, QLearner
from zhixing.config import Fraction, PositiveFloat, QLearningConfig
from zhixing.core.batch import Batch
from zhixing.core.spaces import Spaces
from zhixing.nets.torso import NetFactory
from zhixing.ops.distributions import MASKED_LOGIT
from zhixing.ops.returns import td_target


class MunchausenDQNConfig(QLearningConfig):
    loss: Literal["huber", "mse"] = "huber"
    """Loss of the TD error; huber is linear beyond 1."""
    temperature: PositiveFloat = 0.03
    """Temperature of the softmax policy over Q-values."""
    bonus: Fraction = 0.9
    """Weight of the log-policy bonus added to rewards; 0 is soft DQN."""
    bonus_limit: PositiveFloat = 1.0
    """Bound of the log-policy times the temperature, which is clipped at minus this value."""


@register("munchausen_dqn", "DQN with the scaled log-policy added to the reward")
class MunchausenDQN(QLearner):
    settings = MunchausenDQNConfig

    def __init__(
        self,
        cfg: MunchausenDQNConfig,
        spaces: Spaces,
        device: torch.device | str = "cpu",
        net: NetFactory | None = None,
    ) -> None:
        super().__init__(cfg, spaces, device, net, nn.Linear)
        self.temperature, self.bonus, self.bonus_limit = cfg.temperature, cfg.bonus, cfg.bonus_limit
        self.loss_function = F.huber_loss if cfg.loss == "huber" else F.mse_loss

    @torch.no_grad()
    def target_value(self, batch: Batch, steps: Batch) -> Tensor:
        preference = _allowed(self.q_values(self.target_net, batch), steps, "mask") / self.temperature
        logp = _of(preference.log_softmax(-1), steps.action)
        bonus = self.bonus * (self.temperature * logp).clamp(min=-self.bonus_limit)
        following = _allowed(self.next_q_values(self.target_net, batch), steps, "next_mask") / self.temperature
        return bonus + td_target(steps, self.temperature * following.logsumexp(-1))

    def losses(self, batch: Batch, steps: Batch) -> Losses:
        q = _of(self.q_values(self.net, batch), steps.action)
        target = self.target_value(batch, steps)
        return Losses(self.loss_function(q, target, reduction="none"), q, (target - q.detach()).abs())


def _of(out: Tensor, action: Tensor) -> Tensor:
    """`[B,n]` to that of one action per row `[B]`."""
    return out.gather(-1, action.unsqueeze(-1)).squeeze(-1)


def _allowed(q: Tensor, steps: Batch, mask: str) -> Tensor:
    return q.masked_fill(~getattr(steps, mask), MASKED_LOGIT) if mask in steps else q
