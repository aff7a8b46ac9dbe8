"""Returns and advantages over `[T,N]`. Termination ends the future; any boundary ends the trace."""

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
    """Generalised advantage estimation (Schulman et al., 2016).

    `next_value[t]` is the value of what step t really led to: at a truncated step the episode's last observation,
    not the first one of the next episode.
    """
    delta = reward + gamma * ~terminated * next_value - value  # only death ends the future
    carry = gamma * lam * ~(terminated | truncated)  # any boundary ends the trace
    later = torch.zeros_like(delta[0])
    backwards = []
    for d, c in zip(reversed(delta.unbind()), reversed(carry.unbind()), strict=True):
        later = torch.addcmul(d, c, later)
        backwards.append(later)
    return torch.stack(backwards[::-1])


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
    """V-trace (Espeholt et al., 2018): what states are worth to a policy π, out of steps of another one, μ.

    `log_ratio` is log π(a|s) - log μ(a|s); values are the present critic's. Returns the targets of the values, and the
    advantages of the actions, each weighed with its clipped ratio. Where π = μ and all clips are 1, these are
    n-step returns, or with `lam` those of GAE.
    """
    ratio = log_ratio.exp()
    rho, c = ratio.clamp_max(rho_bar), lam * ratio.clamp_max(c_bar)
    future = gamma * ~terminated  # only death ends the future
    delta = rho * (reward + future * next_value - value)
    carry = gamma * c * ~(terminated | truncated)  # any boundary ends the trace
    later = torch.zeros_like(delta[0])
    backwards = []
    for d, k in zip(reversed(delta.unbind()), reversed(carry.unbind()), strict=True):
        later = torch.addcmul(d, k, later)
        backwards.append(later)
    target = value + torch.stack(backwards[::-1])
    inside = ~(terminated | truncated)
    inside[-1] = False  # what follows the last row has no target of its own
    next_target = torch.where(inside, torch.cat([target[1:], target[-1:]]), next_value)
    return target, rho * (reward + future * next_target - value)


def td_target(steps: Batch, value: Tensor) -> Tensor:
    """What transitions `[B]` are worth, when what they lead to is worth `value [B]` or, several each, `[B,n]`:
    reward + γ^k (1 - terminated) value.
    """
    reward, discount = steps.reward, steps.discount.masked_fill(steps.terminated, 0.0)  # only death ends the future
    if value.ndim > 1:
        discount = discount.unsqueeze(-1)
        reward = reward if reward.ndim > 1 else reward.unsqueeze(-1)
    return reward + discount * value


def next_values(value: Tensor, boundary: Tensor, boundary_value: Tensor) -> Tensor:
    """Values of the next observations `[T,N]` out of those of the observations.

    Within an episode the next observation is the next row's; only the rows in `boundary` (ends and the last row)
    need a value of their own: `boundary_value`, one for each of them in row order.
    """
    following = torch.cat([value[1:], value[-1:]])
    return following.masked_scatter(boundary, boundary_value)
