"""QR-DQN (Dabney et al., 2018).   y_j = r + γ^k (1 - terminated) θ'_j(s', a*),   L = E[w Σ_i E_j ρ_i(y_j - θ_i(s, a))]

A return is a distribution of N equally likely values θ, the quantiles τ_i = (i + ½) / N; a* has the highest mean of θ'.
ρ_i is the quantile Huber loss for τ_i. No range of returns is needed, unlike for C51.
Differs from the paper: 50 quantiles instead of 200 by default, since the loss compares all pairs; n-step returns and
prioritized replay (by the error of the mean) as settings.
"""

from __future__ import annotations

import copy
from functools import partial

import torch
from torch import Tensor

from zhixing.algorithms import register
from zhixing.batch import Batch
from zhixing.config import Positive, PositiveFloat, ValueConfig
from zhixing.learner import Gradients, Learner
from zhixing.nets.body import MakeNet, hidden_fields
from zhixing.nets.heads import AtomsHead
from zhixing.nets.qnet import (
    Expected,
    QNet,
    best_next,
    check_discrete,
    check_sequences,
    epsilon_at,
    learned_steps,
    of_action,
    priorities,
    read,
    read_next,
)
from zhixing.ops.losses import quantile_huber
from zhixing.ops.optim import Average
from zhixing.policy import GreedyPolicy
from zhixing.spaces import Spaces
from zhixing.tree import Tree


class Config(ValueConfig):
    quantiles: Positive = 50  # values that describe the distribution of an action's return
    kappa: PositiveFloat = 1.0  # size of an error beyond which its cost is linear


@register("qrdqn", "DQN that learns the distribution of returns, by its quantiles")
class QRDQN(Learner):
    settings = Config
    metrics = ("loss", "q_mean", "grad_norm")

    def __init__(
        self, cfg: Config, spaces: Spaces, device: torch.device | str = "cpu", net: MakeNet | None = None
    ) -> None:
        check_discrete(cfg, spaces)
        super().__init__(cfg, spaces, device)
        self.cfg = cfg
        with self.building():
            self.net = QNet(spaces, cfg.net, net, partial(AtomsHead, atoms=cfg.quantiles)).to(self.device)
        check_sequences(cfg, self.net)
        self.q_optimizer = self.optimizer(
            self.net.parameters(), cfg.lr, kind=cfg.optimizer, max_grad_norm=cfg.max_grad_norm
        )
        self.target = copy.deepcopy(self.net)
        self.follow = Average(self.target, self.net)
        values = Expected(self.net, partial(torch.mean, dim=-1))
        self.policy = GreedyPolicy(spaces, values, partial(epsilon_at, cfg), cfg.eval_epsilon)

    @property
    def reads(self) -> str:
        return "sequences" if self.net.recurrent else "transitions"

    @property
    def fields(self) -> dict[str, Tree]:
        return {"hidden": hidden_fields(self.policy.initial_hidden(1))} if self.net.recurrent else {}

    @torch.no_grad()
    def target_quantiles(self, batch: Batch, steps: Batch) -> Tensor:
        """What the return of each step may be `[B,quantiles]`, all equally likely."""
        theta = read_next(self.target, batch, self.cfg.replay.burn_in)  # [B,n,quantiles]
        best = of_action(theta, best_next(theta.mean(-1), steps))
        return steps.reward.unsqueeze(-1) + (steps.discount * ~steps.terminated).unsqueeze(-1) * best

    def gradients(self, batch: Batch) -> Gradients:
        steps = learned_steps(batch, self.cfg) if self.net.recurrent else batch
        theta = of_action(read(self.net, batch, self.cfg.replay.burn_in), steps.action)  # [B,quantiles]
        target = self.target_quantiles(batch, steps)
        losses = quantile_huber(theta, target, self.cfg.kappa)  # [B]
        loss = (losses * steps.weight).mean() if "weight" in steps else losses.mean()
        gradient = self.q_optimizer.gradient(loss)
        q = theta.detach().mean(-1)
        metrics = {"loss": loss.detach(), "q_mean": q.mean()}
        return Gradients({"q_optimizer": gradient}, metrics, priorities((target.mean(-1) - q).abs(), batch))

    def value(self, obs: Tree) -> Tensor:
        return self.net(obs)[0].mean(-1).amax(-1)

    def after_step(self) -> None:
        if self.updates % self.cfg.sync_every_updates == 0:
            self.follow.move(self.cfg.tau)
