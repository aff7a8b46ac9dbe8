"""DQN (Mnih et al., 2015).   y = r + γ^k (1 - terminated) max_a Q'(s', a),   L = E[w · huber(y - Q(s, a))]

Differs from the paper: Adam by default, n-step returns and prioritized replay as settings, and targets that may follow
slowly (`tau`) instead of being copied every so often.
"""

from __future__ import annotations

import copy
from typing import Literal

import torch
from gymnasium.spaces import Discrete
from torch import Tensor, nn
from torch.nn import functional as F

from zhixing.algorithms import register
from zhixing.batch import Batch
from zhixing.config import Fraction, NetConfig, OffPolicyConfig, Positive, PositiveFloat
from zhixing.errors import UserError
from zhixing.learner import Gradients, Learner
from zhixing.nets.body import MakeNet, is_recurrent, make_body, num_features
from zhixing.ops.distributions import MASKED
from zhixing.ops.optim import Average, OptimizerKind
from zhixing.ops.schedules import linear
from zhixing.policy import GreedyPolicy
from zhixing.spaces import Spaces
from zhixing.tree import Tree


class Config(OffPolicyConfig):
    lr: PositiveFloat = 1e-3  # learning rate
    optimizer: OptimizerKind = "adam"  # what moves the weights
    loss: Literal["huber", "mse"] = "huber"  # of the error; huber is linear beyond 1
    max_grad_norm: PositiveFloat | None = 10.0  # gradients are clipped to this norm
    sync_every_updates: Positive = 200  # how often the target network moves
    tau: Fraction = 1.0  # how far it moves then; 1 copies the network
    epsilon_start: Fraction = 1.0  # chance of a random action at the start
    epsilon_end: Fraction = 0.05  # and when it has fallen
    epsilon_fraction: Fraction = 0.2  # share of the budget of steps over which it falls
    eval_epsilon: Fraction = 0.0  # chance of a random action in evaluations
    net: NetConfig = NetConfig(hidden_sizes=[128, 128], activation="relu")


class QNet(nn.Module):
    """`net(obs, hidden) -> (q [B,n], hidden)`."""

    def __init__(self, spaces: Spaces, cfg: NetConfig, make_net: MakeNet | None) -> None:
        super().__init__()
        self.body = make_body(spaces.obs, cfg, make_net)
        self.head = nn.Linear(num_features(self.body, spaces.obs), spaces.num_actions)

    def forward(self, obs: Tree, hidden: Tree = None) -> tuple[Tensor, Tree]:
        return self.head(self.body(obs)), None


@register("dqn", "Q-learning with replay and a target network")
class DQN(Learner):
    settings = Config
    metrics = ("loss", "q_mean", "grad_norm")

    def __init__(
        self, cfg: Config, spaces: Spaces, device: torch.device | str = "cpu", net: MakeNet | None = None
    ) -> None:
        if not isinstance(spaces.action, Discrete):
            raise UserError(f"dqn needs Discrete actions, this task has {spaces.action} (for those there is ppo)")
        super().__init__(cfg, spaces, device)
        self.cfg = cfg
        with self.building():
            self.net = QNet(spaces, cfg.net, net).to(self.device)
        if is_recurrent(self.net.body):
            raise UserError("dqn takes no recurrent networks (for those there is ppo)")
        self.q_optimizer = self.optimizer(
            self.net.parameters(), cfg.lr, kind=cfg.optimizer, max_grad_norm=cfg.max_grad_norm
        )
        self.target = copy.deepcopy(self.net)
        self.follow = Average(self.target, self.net)
        self.policy = GreedyPolicy(spaces, self.net, self.epsilon, cfg.eval_epsilon)

    def epsilon(self, env_steps: int) -> float:
        share = env_steps / max(1.0, self.cfg.epsilon_fraction * self.cfg.env_steps)
        return linear(self.cfg.epsilon_start, self.cfg.epsilon_end, share)

    @torch.no_grad()
    def target_value(self, batch: Batch) -> Tensor:
        next_q, _ = self.target(batch.next_obs)
        if "next_mask" in batch:
            next_q = next_q.masked_fill(~batch.next_mask, MASKED)  # never bootstrap from a forbidden action
        return batch.reward + batch.discount * ~batch.terminated * next_q.amax(-1)

    def gradients(self, batch: Batch) -> Gradients:
        q_all, _ = self.net(batch.obs)
        q = q_all.gather(-1, batch.action.unsqueeze(-1)).squeeze(-1)  # [B]
        target = self.target_value(batch)
        error = F.huber_loss if self.cfg.loss == "huber" else F.mse_loss
        losses = error(q, target, reduction="none")
        loss = (losses * batch.weight).mean() if "weight" in batch else losses.mean()
        gradient = self.q_optimizer.gradient(loss)
        metrics = {"loss": loss.detach(), "q_mean": q.detach().mean()}
        return Gradients({"q_optimizer": gradient}, metrics, (target - q.detach()).abs())

    def value(self, obs: Tree) -> Tensor:
        return self.net(obs)[0].amax(-1)

    def after_step(self) -> None:
        if self.updates % self.cfg.sync_every_updates == 0:
            self.follow.move(self.cfg.tau)
