"""DQN (Mnih et al., 2015).   y = r + γ^k (1 - terminated) max_a Q'(s', a),   L = E[w · huber(y - Q(s, a))]

Differs from the paper: Adam by default, n-step returns and prioritized replay as settings, and targets that may follow
slowly (`tau`) instead of being copied every so often.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zhixing.algorithms import register
from zhixing.batch import Batch
from zhixing.config import ValueConfig
from zhixing.learner import Gradients, Learner
from zhixing.nets.body import MakeNet, hidden_fields
from zhixing.nets.heads import DuelingHead
from zhixing.nets.qnet import (
    MakeHead,
    QNet,
    best_next,
    check_discrete,
    check_sequences,
    epsilon_at,
    learned_steps,
    priorities,
    read,
    read_next,
)
from zhixing.ops.distributions import MASKED
from zhixing.ops.optim import Average
from zhixing.policy import GreedyPolicy
from zhixing.spaces import Spaces
from zhixing.tree import Tree


class Config(ValueConfig):
    loss: Literal["huber", "mse"] = "huber"  # of the error; huber is linear beyond 1


@register("dqn", "Q-learning with replay and a target network")
@register("double_dqn", "DQN whose next action is chosen by the network and valued by its target", double=True)
@register("dueling_dqn", "DQN with streams of their own for value and advantages", head=DuelingHead)
class DQN(Learner):
    settings = Config
    metrics = ("loss", "q_mean", "grad_norm")

    def __init__(
        self,
        cfg: Config,
        spaces: Spaces,
        device: torch.device | str = "cpu",
        net: MakeNet | None = None,
        *,
        head: MakeHead = nn.Linear,
        double: bool = False,
    ) -> None:
        check_discrete(cfg, spaces)
        super().__init__(cfg, spaces, device)
        self.cfg, self.double = cfg, double
        with self.building():
            self.net = QNet(spaces, cfg.net, net, head).to(self.device)
        check_sequences(cfg, self.net)
        self.q_optimizer = self.optimizer(
            self.net.parameters(), cfg.lr, kind=cfg.optimizer, max_grad_norm=cfg.max_grad_norm
        )
        self.target = copy.deepcopy(self.net)
        self.follow = Average(self.target, self.net)
        self.policy = GreedyPolicy(spaces, self.net, partial(epsilon_at, cfg), cfg.eval_epsilon)

    @property
    def reads(self) -> str:
        return "sequences" if self.net.recurrent else "transitions"

    @property
    def fields(self) -> dict[str, Tree]:
        return {"hidden": hidden_fields(self.policy.initial_hidden(1))} if self.net.recurrent else {}

    @torch.no_grad()
    def target_value(self, batch: Batch, steps: Batch) -> Tensor:
        burn_in = self.cfg.replay.burn_in
        next_q = read_next(self.target, batch, burn_in)
        if "next_mask" in steps:
            next_q = next_q.masked_fill(~steps.next_mask, MASKED)  # never bootstrap from a forbidden action
        if self.double:
            chosen = best_next(read_next(self.net, batch, burn_in), steps)
            best = next_q.gather(-1, chosen.unsqueeze(-1)).squeeze(-1)
        else:
            best = next_q.amax(-1)
        return steps.reward + steps.discount * ~steps.terminated * best

    def gradients(self, batch: Batch) -> Gradients:
        steps = learned_steps(batch, self.cfg) if self.net.recurrent else batch
        q_all = read(self.net, batch, self.cfg.replay.burn_in)
        q = q_all.gather(-1, steps.action.unsqueeze(-1)).squeeze(-1)  # [B]
        target = self.target_value(batch, steps)
        error = F.huber_loss if self.cfg.loss == "huber" else F.mse_loss
        weighted = "weight" in steps  # drawn by priority
        loss = (error(q, target, reduction="none") * steps.weight).mean() if weighted else error(q, target)
        gradient = self.q_optimizer.gradient(loss)
        metrics = {"loss": loss.detach(), "q_mean": q.detach().mean()}
        priority = priorities((target - q.detach()).abs(), batch) if weighted else None
        return Gradients({"q_optimizer": gradient}, metrics, priority)

    def value(self, obs: Tree) -> Tensor:
        return self.net(obs)[0].amax(-1)

    def after_step(self) -> None:
        if self.updates % self.cfg.sync_every_updates == 0:
            self.follow.move(self.cfg.tau)
