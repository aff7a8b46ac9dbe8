"""A variant of an algorithm: Q-learning with another loss and another maximum, both passed as functions.

A variant is a small learner built from a network, a policy, an optimizer and a target network. It doesn't subclass
another learner, so this file contains the whole update.

Run it with `python custom_loss.py`.

Or on the command line, in the folder of this file:

    zhixing train custom_loss:QLearning --env CartPole-v1 env_steps=20000
"""

import copy
import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zhixing as zx
from zhixing.config import QLearningConfig
from zhixing.core.optimizer import TargetUpdater
from zhixing.nets.policies import GreedyPolicy
from zhixing.nets.qnet import epsilon_at
from zhixing.ops.returns import td_target

GOAL = 9.0  # mean return; the best is 10, random actions get 2.5


def log_cosh(error: Tensor) -> Tensor:
    """Loss that is quadratic near zero and linear far away, like the Huber loss, but smooth."""
    return error + F.softplus(-2 * error) - math.log(2)


def mellowmax(q: Tensor, omega: float = 10.0) -> Tensor:
    """Smooth maximum over actions (Asadi and Littman, 2017): `log(mean(exp(ω q))) / ω`."""
    return (torch.logsumexp(omega * q, -1) - math.log(q.shape[-1])) / omega


class QNet(nn.Module):
    """Follows the interface of `GreedyPolicy`: `net(obs, hidden) -> (q [B,n], hidden)`. Not recurrent."""

    def __init__(self, spaces: zx.Spaces) -> None:
        super().__init__()
        size = math.prod(spaces.obs.shape)
        self.layers = nn.Sequential(nn.Linear(size, 128), nn.ReLU(), nn.Linear(128, spaces.num_actions))

    def forward(self, obs: Tensor, hidden: None = None) -> tuple[Tensor, None]:
        return self.layers(obs.flatten(1)), None


class QLearning(zx.Learner):
    settings = QLearningConfig  # learning rate, exploration, replay buffer and target network, as for DQN
    metrics = ("loss", "grad_norm")

    def __init__(
        self,
        cfg: QLearningConfig,
        spaces: zx.Spaces,
        device: torch.device | str = "cpu",
        loss: Callable[[Tensor], Tensor] = log_cosh,
        max_q: Callable[[Tensor], Tensor] = mellowmax,
    ) -> None:
        super().__init__(cfg, spaces, device)
        self.cfg, self.loss, self.max_q = cfg, loss, max_q
        with self.seeded_init():  # initial weights depend only on the run's seed
            self.net = QNet(spaces).to(self.device)
        self.optimizer = self.make_optimizer(self.net.parameters(), cfg.lr, max_grad_norm=cfg.max_grad_norm)
        self.target_net = copy.deepcopy(self.net)
        self.target_updater = TargetUpdater((self.target_net, self.net))
        self.policy = GreedyPolicy(spaces, self.net, partial(epsilon_at, cfg), cfg.eval_epsilon)

    @zx.train_step
    def update(self, batch: zx.Batch) -> zx.Update:
        with torch.no_grad():
            target = td_target(batch, self.max_q(self.target_net(batch.next_obs)[0]))
        q = self.net(batch.obs)[0].gather(-1, batch.action.unsqueeze(-1)).squeeze(-1)  # [B]
        loss = self.loss(q - target).mean()
        grad_norm = self.optimizer.step(loss)
        if self.updates % self.cfg.target_update_interval == 0:
            self.target_updater.polyak_update(self.cfg.tau)
        return zx.Update({"loss": loss, "grad_norm": grad_norm})


def main() -> dict:
    return zx.train(
        "custom_loss:QLearning", env="toy/match", env_steps=10_000, updates_per_step=0.25, stop_return=GOAL,
        eval_every=1_000,
    )  # fmt: skip


if __name__ == "__main__":
    result = main()
    print(f"mean return {result['final_return']:.2f} of 10")
