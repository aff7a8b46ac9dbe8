"""DQN (Mnih et al., 2015).   y = r + γ^k (1 - terminated) max_a Q'(s', a),   L = E[w · huber(y - Q(s, a))]

Differs from the paper: Adam by default, n-step returns and prioritized replay as settings, and targets that may follow
slowly (`tau`) instead of being copied every so often.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zhixing.algorithms import register
from zhixing.algorithms.common.q_learning import Losses, QLearner
from zhixing.config import QLearningConfig
from zhixing.core.batch import Batch
from zhixing.core.spaces import Spaces
from zhixing.nets.heads import DuelingHead
from zhixing.nets.qnet import QHeadFactory, greedy_next_action
from zhixing.nets.torso import NetFactory
from zhixing.ops.returns import td_target


class DQNConfig(QLearningConfig):
    loss: Literal["huber", "mse"] = "huber"
    """Loss of the TD error; huber is linear beyond 1."""


@register("dqn", "Q-learning with replay and a target network")
@register("double_dqn", "DQN whose next action is chosen by the network and valued by its target", double=True)
@register("dueling_dqn", "DQN with streams of their own for value and advantages", head=DuelingHead)
class DQN(QLearner):
    settings = DQNConfig

    def __init__(
        self,
        cfg: DQNConfig,
        spaces: Spaces,
        device: torch.device | str = "cpu",
        net: NetFactory | None = None,
        *,
        head: QHeadFactory = nn.Linear,
        double: bool = False,
    ) -> None:
        super().__init__(cfg, spaces, device, net, head)
        self.double = double
        self.error = F.huber_loss if cfg.loss == "huber" else F.mse_loss

    @torch.no_grad()
    def target_value(self, batch: Batch, steps: Batch) -> Tensor:
        next_q = self.next_q_values(self.target, batch)
        if not self.double and "next_mask" not in steps:
            best = next_q.amax(-1)  # the same as below, in half the time
        else:
            chosen = greedy_next_action(self.next_q_values(self.net, batch) if self.double else next_q, steps)
            best = next_q.gather(-1, chosen.unsqueeze(-1)).squeeze(-1)
        return td_target(steps, best)

    def losses(self, batch: Batch, steps: Batch) -> Losses:
        q = self.q_values(self.net, batch).gather(-1, steps.action.unsqueeze(-1)).squeeze(-1)  # [B]
        target = self.target_value(batch, steps)
        error = (target - q.detach()).abs() if "weight" in steps else None
        return Losses(self.error(q, target, reduction="mean" if error is None else "none"), q, error)
