"""Teams that play by rule: references for tests and benchmarks. Each gives actions [N,A] for `Battles.step`."""

from __future__ import annotations

import numpy as np

from zhixing.envs.adapters.skirmish.battles import ATTACK, EAST, NOOP, NORTH, SOUTH, STOP, WEST, Battles
from zhixing.envs.vector.step_buffers import Array


def attack_nearest(battles: Battles) -> Array:
    """Each shoots at the nearest enemy in range, else goes to the nearest: what the enemies do."""
    allies, available = battles.num_allies, battles.available
    distance = np.where(battles.alive[:, None, allies:], battles.distance[:, :allies, allies:], np.inf)
    nearest = distance.argmin(-1)[..., None]
    x, y = np.moveaxis(np.take_along_axis(battles.gap[:, :allies, allies:], nearest[..., None], -2)[..., 0, :], -1, 0)
    go = np.where(np.abs(x) > np.abs(y), np.where(x > 0, EAST, WEST), np.where(y > 0, NORTH, SOUTH))
    go = np.where(np.take_along_axis(available, go[..., None], -1)[..., 0], go, STOP)  # the edge of the map
    act = np.where(available[..., ATTACK:].any(-1), ATTACK + nearest[..., 0], go)
    return np.where(battles.alive[:, :allies], act, NOOP)


def focus_fire(battles: Battles) -> Array:
    """Each shoots at the weakest enemy in range that those before it don't kill already; of equals, at the one that is
    nearest to the whole team."""
    allies = battles.num_allies
    actions = attack_nearest(battles)
    left = (battles.health + battles.shield)[:, allies:]
    equals = 1e-3 * (battles.distance[:, :allies, allies:] * battles.alive[:, :allies, None]).sum(1)
    for agent in range(allies):
        in_range = battles.available[:, agent, ATTACK:]
        cost = np.where(left > 0, left, 1e6) + equals  # who falls anyway comes last
        target = np.where(in_range, cost, np.inf).argmin(-1)
        shoots = in_range.any(-1)
        actions[:, agent] = np.where(shoots, ATTACK + target, actions[:, agent])
        fires = (shoots & (battles.wait[:, agent] == 0)).nonzero()[0]
        left[fires, target[fires]] -= battles.damage[agent]
    return actions


def random_play(battles: Battles, rng: np.random.Generator) -> Array:
    """Any available action, all as likely."""
    drawn: Array = np.where(battles.available, rng.random(battles.available.shape), -1.0).argmax(-1)
    return drawn
