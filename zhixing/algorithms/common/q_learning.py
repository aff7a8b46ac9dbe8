"""What learners of action values share (dqn, c51, qrdqn): network, target, greedy policy, and the way of one update.

An algorithm says with `losses` what its network should have said of each step.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from zhixing.config import QLearningConfig
from zhixing.core.batch import Batch
from zhixing.core.learner import Gradients, Learner
from zhixing.core.optimizer import Average
from zhixing.core.spaces import Spaces
from zhixing.core.tree import Tree
from zhixing.nets.noisy import is_noisy, resample, zero_noise
from zhixing.nets.policies import GreedyPolicy
from zhixing.nets.qnet import (
    ExpectedValue,
    QHeadFactory,
    QNet,
    check_discrete,
    check_sequences,
    compute_priority,
    epsilon_at,
    flatten_sequences,
    forward_next_obs,
    forward_obs,
)
from zhixing.nets.torso import NetFactory, hidden_fields


class Losses(NamedTuple):
    """Of each step `[B]`: the loss (where nothing weighs the steps, its mean), the value of the action taken, and how
    wrong it was, where priorities need it."""

    loss: Tensor
    q: Tensor
    error: Tensor | None


class QLearner(Learner):
    metrics = ("loss", "q_mean", "grad_norm")

    def __init__(
        self,
        cfg: QLearningConfig,
        spaces: Spaces,
        device: torch.device | str,
        net: NetFactory | None,
        head: QHeadFactory,
        mean: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """`head` makes what the network says of each action; `mean` a value of it, where it isn't one itself."""
        check_discrete(cfg, spaces)
        super().__init__(cfg, spaces, device)
        self.cfg = cfg
        with self.building():
            self.net = QNet(spaces, cfg.net, net, head, normalize=cfg.normalize_obs).to(self.device)
        check_sequences(cfg, self.net)
        self.noisy = is_noisy(self.net)
        self.q_optimizer = self.make_optimizer(
            self.net.parameters(), cfg.lr, kind=cfg.optimizer, max_grad_norm=cfg.max_grad_norm
        )
        self.target = copy.deepcopy(self.net)
        self.follow = Average(self.target, self.net)
        values = self.net if mean is None else ExpectedValue(self.net, mean)
        self.policy = GreedyPolicy(spaces, values, partial(epsilon_at, cfg), cfg.eval_epsilon)

    @abstractmethod
    def losses(self, batch: Batch, steps: Batch) -> Losses:
        """`steps` are those of `batch` that are learned from, `[B]`: all, or those of sequences after the burn-in."""

    def q_values(self, net: QNet, batch: Batch) -> Tensor:
        """What a network says of the steps' observations `[B,n,...]`."""
        return forward_obs(net, batch, self.cfg.replay.burn_in)

    def next_q_values(self, net: QNet, batch: Batch) -> Tensor:
        return forward_next_obs(net, batch, self.cfg.replay.burn_in)

    def gradients(self, batch: Batch) -> Gradients:
        if self.noisy:
            resample(self.net, self.rng)
            resample(self.target, self.rng)
        steps = flatten_sequences(batch, self.cfg) if self.net.recurrent else batch
        losses, q, error = self.losses(batch, steps)
        loss = (losses * steps.weight).mean() if "weight" in steps else losses.mean() if losses.ndim else losses
        gradient = self.q_optimizer.gradient(loss)
        metrics = {"loss": loss.detach(), "q_mean": q.detach().mean()}
        return Gradients({"q_optimizer": gradient}, metrics, None if error is None else compute_priority(error, batch))

    @torch.no_grad()
    def priority(self, batch: Batch) -> Tensor | None:
        if self.net.recurrent:  # whose errors depend on what went before
            return None
        weighed = Batch(**{name: getattr(batch, name) for name in batch.fields}, weight=torch.ones_like(batch.reward))
        return self.losses(weighed, weighed).error

    def after_step(self) -> None:
        if self.updates % self.cfg.target_update_interval == 0:
            self.follow.move(self.cfg.tau)

    def value(self, obs: Tree) -> Tensor:
        zero_noise(self.net)
        return self.policy.net(obs)[0].amax(-1)  # type: ignore[operator]

    @property
    def reads(self) -> Literal["transitions", "sequences"]:
        return "sequences" if self.net.recurrent else "transitions"

    @property
    def fields(self) -> dict[str, Tree]:
        return {"hidden": hidden_fields(self.policy.initial_hidden(1))} if self.net.recurrent else {}
