"""Helpers for tests with losses worked out by hand: tiny spaces, networks with constant outputs, and small batches."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from torch import Tensor, nn

from zhixing.core.batch import Batch
from zhixing.core.learner import Learner
from zhixing.core.policy import Phase
from zhixing.core.spaces import Spaces
from zhixing.core.tree import tree_map

OBS = Box(-9.0, 9.0, (2,), np.float32)
DISCRETE = Spaces(OBS, Discrete(3))
CONTINUOUS = Spaces(OBS, Box(-1.0, 1.0, (1,), np.float32))
LOGITS = [math.log(0.5), math.log(0.25), math.log(0.25)]  # of a policy with the entropy ENTROPY
ENTROPY = 1.5 * math.log(2)


def set_critic_outputs(critics: Any, *outputs: list[float]) -> None:
    """Make the output of each critic independent of the observation.

    `outputs` are, per critic, the values of all discrete actions, or `[slope, constant]` for a continuous action.
    """
    with torch.no_grad():
        weight, bias = critics.towers.weights[0], critics.towers.biases[0]
        weight.zero_()
        if critics.discrete:
            bias.copy_(torch.tensor(outputs)[:, None])
            return
        weight[:, -1, 0] = torch.tensor(outputs)[:, 0]  # inputs are [obs, obs, action]
        bias[:, 0, 0] = torch.tensor(outputs)[:, 1]


def set_net_output(net: Any, *output: float, std: float | None = None) -> None:
    """Make a network without hidden layers return `output`, and `std` if it is an actor, for any observation."""
    with torch.no_grad():
        net.layers.linears[0].weight.zero_()
        net.layers.linears[0].bias.copy_(torch.tensor(output))
        if std is not None:  # the inverse of log std = 5 sigmoid(raw) - 5
            net.log_std_raw.fill_(math.log((5 + math.log(std)) / -math.log(std)))


def batch(**fields: Any) -> Batch:
    """Return three equal steps: one within an episode, one that terminates, one that is truncated."""
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


def column(*values: Any) -> Tensor:
    """Return values of one environment as a rollout `[T,1]`."""
    return torch.tensor(values)[:, None]


def flag_at(*steps: int, length: int = 3) -> Tensor:
    """Return flags of a rollout `[T,1]` that are true at the given steps."""
    flag = torch.zeros(length, 1, dtype=torch.bool)
    flag[list(steps)] = True
    return flag


def copy_weights(*nets: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for net in nets for p in net.parameters()]


def named_weights(net: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in net.named_parameters()}


def changed_parts(net: nn.Module, before: dict[str, Tensor]) -> set[str]:
    """Return the parts of a network, i.e. the first words of parameter names, whose weights differ from `before`."""
    return {name.split(".")[0] for name, p in net.named_parameters() if not torch.equal(p, before[name])}


def all_equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a, b, strict=True))


def check_polyak_update(target: nn.Module, before: list[Tensor], source: nn.Module, tau: float) -> None:
    """Check that an update moved the target's weights from `before` by `tau` of the distance to the source's."""
    for t, b, s in zip(target.parameters(), before, source.parameters(), strict=True):
        assert torch.allclose(t, (1 - tau) * b + tau * s, atol=1e-7)
    assert not all_equal(before, copy_weights(target))
    assert not any(p.requires_grad for p in target.parameters())


def gradient_of(loss: Tensor, parameter: Tensor) -> list[float]:
    return torch.autograd.grad(loss, [parameter])[0].flatten().tolist()


def next_noise(learner: Learner, rows: int = 3) -> Tensor:
    """Return the noise of the learner's next sample `[rows,1]`, without drawing it."""
    rng = torch.Generator()
    rng.set_state(learner.rng.get_state())
    return torch.empty(rows, 1).normal_(generator=rng)


def collect_greedy_rollout(learner: Any, steps: int, envs: int, seed: int = 0) -> Batch:
    """Return a rollout `[T,N]` of a greedy recurrent policy on random observations, with random rewards and no ends."""
    g = torch.Generator().manual_seed(seed)
    obs = torch.rand(steps + 1, envs, *learner.spaces.obs.shape, generator=g)
    hidden, actions, hiddens = learner.policy.initial_hidden(envs), [], []
    with torch.no_grad():
        for t in range(steps):
            decision = learner.policy.act(obs[t], hidden, None, Phase.EVAL, g, 0)
            actions.append(decision.action)
            hiddens.append(hidden)
            hidden = decision.hidden
    never = torch.zeros(steps, envs, dtype=torch.bool)
    fields = {"action": torch.stack(actions), "hidden": tree_map(lambda *leaves: torch.stack(leaves), *hiddens)}
    reward = torch.randn(steps, envs, generator=g)
    return Batch(obs=obs[:-1], reward=reward, terminated=never, truncated=never.clone(), next_obs=obs[1:], **fields)


def collect_random_rollout(learner: Any, steps: int, envs: int, seed: int = 0) -> Batch:
    """Return a rollout `[T,N]` of the learner's policy on random observations, with random rewards and no ends."""
    g = torch.Generator().manual_seed(seed)
    obs = torch.rand(steps + 1, envs, *learner.spaces.obs.shape, generator=g)
    hidden, decisions, hiddens = learner.policy.initial_hidden(envs), [], []
    with torch.no_grad():
        for t in range(steps):
            decisions.append(learner.policy.act(obs[t], hidden, None, Phase.COLLECT, g, 0))
            hiddens.append(hidden)
            hidden = decisions[-1].hidden
    fields: dict[str, Any] = {n: torch.stack([getattr(d, n) for d in decisions]) for n in ("action", "logp", "value")}
    if hidden is not None:
        fields["hidden"] = tree_map(lambda *leaves: torch.stack(leaves), *hiddens)
    never = torch.zeros(steps, envs, dtype=torch.bool)
    reward = torch.randn(steps, envs, generator=g)
    return Batch(obs=obs[:-1], reward=reward, terminated=never, truncated=never.clone(), next_obs=obs[1:], **fields)
