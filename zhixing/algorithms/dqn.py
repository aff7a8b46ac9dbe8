"""DQN (Mnih et al., 2015).   y = r + γ^k (1 - terminated) max_a Q'(s', a),   L = E[w · huber(y - Q(s, a))]

Double DQN (van Hasselt et al., 2016) evaluates the action argmax_a Q(s', a) with Q' instead. Dueling DQN (Wang et al.,
2016) is a network with separate outputs for state values and advantages.
Differs from the paper: Adam by default; n-step returns, prioritized replay, and Polyak-averaged targets (`tau`) in
place of copies, are settings.
`QLearner`, in this file, is the base class of all single-agent algorithms that learn Q-values.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zhixing.algorithms import register
from zhixing.config import QLearningConfig
from zhixing.core.batch import Batch
from zhixing.core.learner import Learner, Update, train_step
from zhixing.core.optimizer import TargetUpdater
from zhixing.core.spaces import Spaces
from zhixing.core.tree import Tree
from zhixing.nets.heads import DuelingHead
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
    next_state_value,
)
from zhixing.nets.torso import NetFactory, hidden_fields
from zhixing.ops.distributions import gather_actions
from zhixing.ops.losses import weighted_mean
from zhixing.ops.returns import td_target


class DQNConfig(QLearningConfig):
    algorithm: str = "dqn"
    loss: Literal["huber", "mse"] = "huber"
    """Loss of the TD error; huber is linear beyond 1."""


class DoubleDQNConfig(DQNConfig):
    algorithm: str = "double_dqn"


class DuelingDQNConfig(DQNConfig):
    algorithm: str = "dueling_dqn"


class Losses(NamedTuple):
    """Losses, Q-values and absolute TD errors `[B]` of the actions of a batch.

    Without importance weights, `loss` may be the mean already. `td_error` may be None if no priorities are needed.
    """

    loss: Tensor
    q: Tensor
    td_error: Tensor | None


class QLearner(Learner):
    """Q-network, target network, epsilon-greedy policy and update. An algorithm implements `losses`."""

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
        """`head` makes the output layers; `mean` maps their output per action to a Q-value if it is a distribution."""
        check_discrete(cfg, spaces)
        super().__init__(cfg, spaces, device)
        self.cfg = cfg
        with self.seeded_init():
            self.net = QNet(spaces, cfg.net, net, head, normalize=cfg.normalize_obs).to(self.device)
        check_sequences(cfg, self.net)
        self.noisy = is_noisy(self.net)
        self.optimizer = self.make_optimizer(self.net.parameters(), cfg.lr, max_grad_norm=cfg.max_grad_norm)
        self.target_net = copy.deepcopy(self.net)
        self.target_updater = TargetUpdater((self.target_net, self.net))
        values = self.net if mean is None else ExpectedValue(self.net, mean)
        self.policy = GreedyPolicy(spaces, values, partial(epsilon_at, cfg), cfg.eval_epsilon)

    @property
    def sample_type(self) -> Literal["transitions", "sequences"]:
        return "sequences" if self.net.recurrent else "transitions"

    @property
    def extra_fields(self) -> dict[str, Tree]:
        return {"hidden": hidden_fields(self.policy.initial_hidden(1))} if self.net.recurrent else {}

    def value(self, obs: Tree) -> Tensor:
        zero_noise(self.net)
        return self.policy.net(obs)[0].amax(-1)  # type: ignore[operator]

    @torch.no_grad()
    def priority(self, batch: Batch) -> Tensor | None:
        if self.net.recurrent:  # TD errors depend on the steps before
            return None
        fields = {name: getattr(batch, name) for name in batch.fields}
        weighted = Batch(**fields, weight=torch.ones_like(batch.reward))
        return self.losses(weighted, weighted).td_error

    def q_values(self, net: QNet, batch: Batch) -> Tensor:
        """Return the network's outputs for the observations of the steps, `[B,n,...]`."""
        return forward_obs(net, batch, self.cfg.replay.burn_in)

    def next_q_values(self, net: QNet, batch: Batch) -> Tensor:
        """Return the network's outputs for the next observations of the steps, `[B,n,...]`."""
        return forward_next_obs(net, batch, self.cfg.replay.burn_in)

    @abstractmethod
    def losses(self, batch: Batch, steps: Batch) -> Losses:
        """Return the losses of `steps [B]`: the transitions of `batch`, or steps of its sequences after the burn-in."""

    @train_step
    def update(self, batch: Batch) -> Update:
        if self.noisy:
            resample(self.net, self.rng)
            resample(self.target_net, self.rng)
        steps = flatten_sequences(batch, self.cfg) if self.net.recurrent else batch
        losses, q, td_error = self.losses(batch, steps)
        loss = weighted_mean(losses, steps) if losses.ndim else losses
        grad_norm = self.optimizer.step(loss)
        if self.updates % self.cfg.target_update_interval == 0:
            self.target_updater.polyak_update(self.cfg.tau)
        priority = None if td_error is None else compute_priority(td_error, batch)
        return Update({"loss": loss, "q_mean": q.detach().mean(), "grad_norm": grad_norm}, priority)


@register("dqn", "Q-learning with replay and a target network")
@register(
    "double_dqn",
    "DQN with next actions chosen by the online network and evaluated by the target network",
    DoubleDQNConfig,
    double=True,
)
@register("dueling_dqn", "DQN with separate streams for value and advantages", DuelingDQNConfig, head=DuelingHead)
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
        self.loss_function = F.huber_loss if cfg.loss == "huber" else F.mse_loss

    @torch.no_grad()
    def target_value(self, batch: Batch, steps: Batch) -> Tensor:
        next_q = self.next_q_values(self.target_net, batch)
        choice_q = self.next_q_values(self.net, batch) if self.double else None
        return td_target(steps, next_state_value(next_q, steps, choice_q))

    def losses(self, batch: Batch, steps: Batch) -> Losses:
        q = gather_actions(self.q_values(self.net, batch), steps.action)  # [B]
        target = self.target_value(batch, steps)
        if "weight" not in steps:
            return Losses(self.loss_function(q, target), q, None)
        return Losses(self.loss_function(q, target, reduction="none"), q, (target - q.detach()).abs())
