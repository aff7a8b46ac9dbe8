"""Your own variation of an algorithm: Q-learning with another loss and another maximum, both plain functions.

A variation is a small learner made of parts (network, policy, optimizer, target network), not a subclass of another
learner: all that it does stands in this file. The functions are arguments, so the next variation is another call.

Run it with `python own_loss.py`, or from its folder by the command line:

    zhixing train own_loss:QLearning --env CartPole-v1 env_steps=20000
"""

import copy
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zhixing as zx
from zhixing.config import QLearningConfig
from zhixing.core.optimizer import TargetUpdater
from zhixing.nets.policies import GreedyPolicy
from zhixing.ops.returns import td_target
from zhixing.ops.schedules import linear_schedule

GOAL = 9.0  # of 10 right answers per episode; guessing finds 2.5


def log_cosh(error: Tensor) -> Tensor:
    """Quadratic near zero and linear far away, like Huber's, but smooth everywhere."""
    return error + F.softplus(-2 * error) - math.log(2)


def mellowmax(q: Tensor) -> Tensor:
    """A maximum that heeds all actions (Asadi and Littman, 2017): `log(mean(exp(ω q))) / ω`, here with ω = 10."""
    return (torch.logsumexp(10 * q, -1) - math.log(q.shape[-1])) / 10


class QNet(nn.Module):
    """What `GreedyPolicy` asks for: `net(obs, hidden) -> (q [B,n], hidden)`, here without memory."""

    def __init__(self, spaces: zx.Spaces) -> None:
        super().__init__()
        size = math.prod(spaces.obs.shape)
        self.layers = nn.Sequential(nn.Linear(size, 128), nn.ReLU(), nn.Linear(128, spaces.num_actions))

    def forward(self, obs: Tensor, hidden: None = None) -> tuple[Tensor, None]:
        return self.layers(obs.flatten(1)), None


class QLearning(zx.Learner):
    settings = QLearningConfig  # learning rate, target network, exploration, replay: nothing new is needed
    metrics = ("loss", "grad_norm")

    def __init__(
        self,
        cfg: QLearningConfig,
        spaces: zx.Spaces,
        device: torch.device | str = "cpu",
        loss: Callable[[Tensor], Tensor] = log_cosh,
        best: Callable[[Tensor], Tensor] = mellowmax,
    ) -> None:
        super().__init__(cfg, spaces, device)
        self.cfg, self.loss, self.best = cfg, loss, best
        with self.seeded_init():  # weights depend on the run's seed only
            self.net = QNet(spaces).to(self.device)
        self.optimizer = self.make_optimizer(self.net.parameters(), cfg.lr, max_grad_norm=cfg.max_grad_norm)
        self.target_net = copy.deepcopy(self.net)
        self.target_updater = TargetUpdater((self.target_net, self.net))
        self.policy = GreedyPolicy(spaces, self.net, self.epsilon, cfg.eval_epsilon)

    def epsilon(self, env_steps: int) -> float:
        share = env_steps / (self.cfg.epsilon_fraction * self.cfg.env_steps)
        return linear_schedule(self.cfg.epsilon_start, self.cfg.epsilon_end, share)

    @zx.train_step
    def update(self, batch: zx.Batch) -> zx.Update:
        with torch.no_grad():
            target = td_target(batch, self.best(self.target_net(batch.next_obs)[0]))
        q = self.net(batch.obs)[0].gather(-1, batch.action.unsqueeze(-1)).squeeze(-1)  # [B]
        loss = self.loss(q - target).mean()
        grad_norm = self.optimizer.step(loss)
        if self.updates % self.cfg.target_update_interval == 0:
            self.target_updater.polyak_update(self.cfg.tau)
        return zx.Update({"loss": loss, "grad_norm": grad_norm})


def main() -> dict:
    return zx.train(
        "own_loss:QLearning", env="toy/match", env_steps=10_000, updates_per_step=0.25, stop_return=GOAL,
        eval_every_steps=1_000,
    )  # fmt: skip


if __name__ == "__main__":
    result = main()
    print(f"{result['final_return']:.2f} of 10 right")
