"""What tests share that work out losses by hand: tiny spaces, networks that say what they are told, a batch of ends."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from torch import Tensor

from zhixing.core.batch import Batch
from zhixing.core.learner import Learner
from zhixing.core.spaces import Spaces

OBS = Box(-9.0, 9.0, (2,), np.float32)
DISCRETE = Spaces(OBS, Discrete(3))
CONTINUOUS = Spaces(OBS, Box(-1.0, 1.0, (1,), np.float32))
LOGITS = [math.log(0.5), math.log(0.25), math.log(0.25)]  # logits of a policy with this entropy
ENTROPY = 1.5 * math.log(2)


def set_critic_outputs(critics: Any, *worth: list[float]) -> None:
    """Each critic says the same of every observation: the worth of each choice, or `[slope, constant]` of a move."""
    with torch.no_grad():
        weight, bias = critics.towers.weights[0], critics.towers.biases[0]
        weight.zero_()
        if critics.discrete:
            bias.copy_(torch.tensor(worth)[:, None])
            return
        weight[:, -1, 0] = torch.tensor(worth)[:, 0]  # of [obs, obs, action]
        bias[:, 0, 0] = torch.tensor(worth)[:, 1]


def set_net_output(net: Any, *out: float, std: float | None = None) -> None:
    """A network of one layer says the same of every observation; `std` is an actor's that has one for all."""
    with torch.no_grad():
        net.layers.linears[0].weight.zero_()
        net.layers.linears[0].bias.copy_(torch.tensor(out))
        if std is not None:  # between e^-5 and 1
            net.log_std_raw.fill_(math.log((5 + math.log(std)) / -math.log(std)))


def batch(**fields: Any) -> Batch:
    """Three equal steps: one that goes on, one that terminates, one that is truncated."""
    base = {
        "obs": torch.zeros(3, 2),
        "next_obs": torch.zeros(3, 2),
        "action": torch.tensor([0, 1, 2]),
        "reward": torch.tensor([1.0, 1.0, 1.0]),
        "terminated": torch.tensor([False, True, False]),
        "truncated": torch.tensor([False, False, True]),
        "discount": torch.tensor([0.9, 0.9, 0.9]),
        "index": torch.arange(3),
    }
    return Batch(**{**base, **fields})


def peek_noise(made: Learner, rows: int = 3) -> Tensor:
    """The noise of the next sample `[rows,1]`, without drawing it."""
    rng = torch.Generator()
    rng.set_state(made.rng.get_state())
    return torch.empty(rows, 1).normal_(generator=rng)
