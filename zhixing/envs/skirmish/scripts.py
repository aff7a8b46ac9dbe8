"""Two teams that play by rule: references for tests and benchmarks. Each gives actions [N,A] for `Battles.step`."""

from __future__ import annotations

import numpy as np

from zhixing.envs.arrays import Array
from zhixing.envs.skirmish.battles import ATTACK, EAST, NOOP, NORTH, SOUTH, STOP, WEST, Battles


def attack_nearest(battles: Battles) -> Array:
    """Each shoots at the nearest enemy in range, else goes to the nearest: what the enemies do."""
    allies = battles.num_allies
    return _attack(battles, battles.distance[:, :allies, allies:])


def focus_fire(battles: Battles) -> Array:
    """Each shoots at the enemy in range with the least health and shield left, the first of equals."""
    allies = battles.num_allies
    strength = (battles.health + battles.shield)[:, None, allies:]
    return _attack(battles, np.broadcast_to(strength, battles.available[..., ATTACK:].shape))


def random_play(battles: Battles, rng: np.random.Generator) -> Array:
    """Any available action, all as likely."""
    draws: Array = np.where(battles.available, rng.random(battles.available.shape), -1.0).argmax(-1)
    return draws


def _attack(battles: Battles, cost: Array) -> Array:
    """Attack the cheapest target in range, else go to the nearest."""
    allies, available = battles.num_allies, battles.available
    targets = available[..., ATTACK:]
    attack = ATTACK + np.where(targets, cost, np.inf).argmin(-1)
    distance = np.where(battles.alive[:, None, allies:], battles.distance[:, :allies, allies:], np.inf)
    nearest = distance.argmin(-1)[..., None, None]
    x, y = np.moveaxis(np.take_along_axis(battles.gap[:, :allies, allies:], nearest, -2)[..., 0, :], -1, 0)
    go = np.where(np.abs(x) > np.abs(y), np.where(x > 0, EAST, WEST), np.where(y > 0, NORTH, SOUTH))
    go = np.where(np.take_along_axis(available, go[..., None], -1)[..., 0], go, STOP)  # the edge of the map
    lives = battles.alive[:, :allies]
    return np.where(lives, np.where(targets.any(-1), attack, go), NOOP)
