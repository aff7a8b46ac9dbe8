"""QR-DQN (Dabney et al., 2018).   y_j = r + γ^k (1 - terminated) θ'_j(s', a*),   L = E[w Σ_i E_j ρ_i(y_j - θ_i(s, a))]

The return of an action is a distribution of N equally likely values θ_i, its quantiles at τ_i = (i + ½) / N. a* is the
action with the highest mean of θ'. ρ_i is the quantile Huber loss for τ_i. Unlike C51, no range of returns is needed.
Differs from the paper: 50 quantiles by default instead of 200, because the loss compares all pairs; n-step returns and
prioritized replay, with the error of the mean as priority, are settings.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated

import torch
from torch import Tensor

from zhixing.algorithms import register
from zhixing.algorithms.dqn import Losses, QLearner
from zhixing.config import Group, Positive, PositiveFloat, QLearningConfig
from zhixing.core.batch import Batch
from zhixing.core.spaces import Spaces
from zhixing.nets.heads import AtomsHead
from zhixing.nets.qnet import gather_atoms, greedy_next_action
from zhixing.nets.torso import NetFactory
from zhixing.ops.losses import quantile_huber_loss
from zhixing.ops.returns import td_target


class QRDQNConfig(QLearningConfig):
    algorithm: str = "qrdqn"
    quantiles: Annotated[Positive, Group.NETWORK] = 50
    """Number of quantiles of the return distribution."""
    kappa: PositiveFloat = 1.0
    """Error beyond which the quantile Huber loss is linear."""


@register("qrdqn", "distributional DQN with quantile regression")
class QRDQN(QLearner):
    settings = QRDQNConfig

    def __init__(
        self, cfg: QRDQNConfig, spaces: Spaces, device: torch.device | str = "cpu", net: NetFactory | None = None
    ) -> None:
        head = partial(AtomsHead, atoms=cfg.quantiles)
        super().__init__(cfg, spaces, device, net, head, partial(torch.mean, dim=-1))
        self.kappa = cfg.kappa

    @torch.no_grad()
    def target_quantiles(self, batch: Batch, steps: Batch) -> Tensor:
        """Return equally likely values of the target return of each step, `[B,quantiles]`."""
        theta = self.next_q_values(self.target_net, batch)  # [B,n,quantiles]
        return td_target(steps, gather_atoms(theta, greedy_next_action(theta.mean(-1), steps)))

    def losses(self, batch: Batch, steps: Batch) -> Losses:
        theta = gather_atoms(self.q_values(self.net, batch), steps.action)  # [B,quantiles]
        target = self.target_quantiles(batch, steps)
        q = theta.detach().mean(-1)
        return Losses(quantile_huber_loss(theta, target, self.kappa), q, (target.mean(-1) - q).abs())
