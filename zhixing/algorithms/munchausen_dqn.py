"""Munchausen DQN (Vieillard et al., 2020).   y = r + α [τ log π(a|s)]_{l..0} + γ^k (1 - terminated) V(s')

π = softmax(Q' / τ) and V(s') = τ log Σ_a exp(Q'(s', a) / τ), both of the target network. The scaled log-probability of
the action is added to the reward, which widens the gaps between the Q-values of actions. It is clipped at l < 0, since
it has no lower bound. The settings are τ `temperature`, α `bonus` and -l `bonus_limit`.
Differs from the paper: Huber or squared loss, n-step returns (with the bonus of the first action only), prioritized
replay and Polyak-averaged targets (`tau`) are settings.
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
from zhixing.ops.distributions import gather_actions, mask_logits
from zhixing.ops.returns import td_target


class MunchausenDQNConfig(QLearningConfig):
    algorithm: str = "munchausen_dqn"
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
        logits = mask_logits(self.q_values(self.target_net, batch), steps.get("mask")) / self.temperature
        logp = gather_actions(logits.log_softmax(-1), steps.action)
        bonus = self.bonus * (self.temperature * logp).clamp(min=-self.bonus_limit)
        next_logits = mask_logits(self.next_q_values(self.target_net, batch), steps.get("next_mask")) / self.temperature
        return bonus + td_target(steps, self.temperature * next_logits.logsumexp(-1))

    def losses(self, batch: Batch, steps: Batch) -> Losses:
        q = gather_actions(self.q_values(self.net, batch), steps.action)
        target = self.target_value(batch, steps)
        return Losses(self.loss_function(q, target, reduction="none"), q, (target - q.detach()).abs())
