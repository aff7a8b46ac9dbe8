"""Your own variation of an algorithm: DQN with another loss and another target, both plain functions.

A variation is a small learner made of the same parts (network, policy, optimizer, target network), not a subclass of
another learner: all that it does stands in this file.

    python own_loss.py
    zhixing train own_loss:QLearning --env CartPole-v1 env_steps=20000
"""

import copy
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zhixing as zx
from zhixing.algorithms.dqn import Config, QNet
from zhixing.ops.optim import Average
from zhixing.ops.schedules import linear
from zhixing.policy import GreedyPolicy

GOAL = 9.0  # of 10 right answers per episode; guessing finds 2.5


def log_cosh(error: Tensor) -> Tensor:
    """Quadratic near zero and linear far away, like Huber's, but smooth everywhere."""
    return error + F.softplus(-2 * error) - math.log(2)


def double_q(net: nn.Module, target: nn.Module, next_obs: Tensor) -> Tensor:
    """One network chooses, the other judges: the maximum of noisy values is too high (van Hasselt et al., 2016)."""
    best = net(next_obs)[0].argmax(-1, keepdim=True)
    return target(next_obs)[0].gather(-1, best).squeeze(-1)


class QLearning(zx.Learner):
    settings = Config
    metrics = ("loss", "grad_norm")

    def __init__(
        self,
        cfg: Config,
        spaces: zx.Spaces,
        device: torch.device | str = "cpu",
        net: Callable | None = None,
        loss: Callable[[Tensor], Tensor] = log_cosh,
        next_value: Callable[[nn.Module, nn.Module, Tensor], Tensor] = double_q,
    ) -> None:
        super().__init__(cfg, spaces, device)
        self.cfg, self.loss, self.next_value = cfg, loss, next_value
        with self.building():  # first weights that depend on the seed only
            self.net = QNet(spaces, cfg.net, net).to(self.device)
        self.q_optimizer = self.optimizer(self.net.parameters(), cfg.lr, max_grad_norm=cfg.max_grad_norm)
        self.target = copy.deepcopy(self.net)
        self.follow = Average(self.target, self.net)
        self.policy = GreedyPolicy(spaces, self.net, self.epsilon, cfg.eval_epsilon)

    def epsilon(self, env_steps: int) -> float:
        share = env_steps / (self.cfg.epsilon_fraction * self.cfg.env_steps)
        return linear(self.cfg.epsilon_start, self.cfg.epsilon_end, share)

    def gradients(self, batch: zx.Batch) -> zx.Gradients:
        with torch.no_grad():
            after = self.next_value(self.net, self.target, batch.next_obs)
            target = batch.reward + batch.discount * ~batch.terminated * after  # only death ends the future
        q = self.net(batch.obs)[0].gather(-1, batch.action.unsqueeze(-1)).squeeze(-1)  # [B]
        loss = self.loss(q - target).mean()
        return zx.Gradients({"q_optimizer": self.q_optimizer.gradient(loss)}, {"loss": loss.detach()})

    def after_step(self) -> None:
        if self.updates % self.cfg.sync_every_updates == 0:
            self.follow.move(self.cfg.tau)


def main() -> dict:
    return zx.train(
        "own_loss:QLearning", env="toy/match", env_steps=10_000, updates_per_step=0.25, stop_return=GOAL,
        eval_every_steps=1_000,
    )  # fmt: skip


if __name__ == "__main__":
    result = main()
    print(f"{result['final_return']:.2f} of 10 right")
