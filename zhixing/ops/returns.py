"""Returns and advantages of rollouts `[T,N]`.

Termination stops bootstrapping; termination and truncation both end the trace.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zhixing.core.batch import Batch


def gae(
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    gamma: float,
    lam: float,
) -> Tensor:
    """Generalized advantage estimation (Schulman et al., 2016).

    `next_value[t]` is the value of the true next observation of step t: at a truncated step the final observation of
    the episode, not the first one of the next episode.
    """
    delta = reward + gamma * ~terminated * next_value - value  # only termination stops bootstrapping
    carry = gamma * lam * ~(terminated | truncated)  # the trace ends at every episode end
    advantage = torch.zeros_like(delta[0])
    advantages = []
    for d, c in zip(reversed(delta.unbind()), reversed(carry.unbind()), strict=True):
        advantage = torch.addcmul(d, c, advantage)
        advantages.append(advantage)
    return torch.stack(advantages[::-1])


def vtrace(
    log_ratio: Tensor,
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    gamma: float,
    lam: float = 1.0,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """V-trace (Espeholt et al., 2018): off-policy value targets for a policy π from steps of a policy μ.

    `log_ratio` is log π(a|s) - log μ(a|s), and values are the current critic's. Returns the value targets, and the
    advantages multiplied by the clipped ratio. If π = μ and all clips are 1, the targets are n-step returns, or
    λ-returns as in GAE with `lam`.
    """
    ratio = log_ratio.exp()
    rho, c = ratio.clamp_max(rho_bar), lam * ratio.clamp_max(c_bar)
    discount = gamma * ~terminated  # only termination stops bootstrapping
    delta = rho * (reward + discount * next_value - value)
    carry = gamma * c * ~(terminated | truncated)  # the trace ends at every episode end
    advantage = torch.zeros_like(delta[0])
    advantages = []
    for d, k in zip(reversed(delta.unbind()), reversed(carry.unbind()), strict=True):
        advantage = torch.addcmul(d, k, advantage)
        advantages.append(advantage)
    target = value + torch.stack(advantages[::-1])
    inside = ~(terminated | truncated)
    inside[-1] = False  # the observation after the last row has no target
    next_target = torch.where(inside, torch.cat([target[1:], target[-1:]]), next_value)
    return target, rho * (reward + discount * next_target - value)


def td_target(steps: Batch, value: Tensor) -> Tensor:
    """Return the TD target `reward + γ^k (1 - terminated) value` of transitions `[B]`, for values `[B]` or `[B,n]`."""
    reward = steps.reward
    discount = steps.discount.masked_fill(steps.terminated, 0.0)  # only termination stops bootstrapping
    if value.ndim > 1:
        discount = discount.unsqueeze(-1)
        reward = reward if reward.ndim > 1 else reward.unsqueeze(-1)
    return reward + discount * value


def rollout_boundary(rollout: Batch) -> Tensor:
    """Return the steps `[T,N]` whose next observation isn't in the next row: episode ends and the last row."""
    boundary = rollout.terminated | rollout.truncated
    boundary[-1] = True
    return boundary


def next_values(value: Tensor, boundary: Tensor, boundary_value: Tensor) -> Tensor:
    """Return the values of the next observations `[T,N]`, given the values of the observations.

    Within an episode, the next value is that of the next row. `boundary_value` holds the others, in row order: one for
    each step of `rollout_boundary`.
    """
    shifted = torch.cat([value[1:], value[-1:]])
    return shifted.masked_scatter(boundary, boundary_value)
