"""Scripted teams, as references for tests and benchmarks. Each function returns actions [N,A] for `Battles.step`."""

from __future__ import annotations

import numpy as np

from zhixing.envs.adapters.skirmish.battles import ATTACK, EAST, NOOP, NORTH, SOUTH, STOP, WEST, Battles
from zhixing.envs.vector.step_buffers import Array


def attack_nearest(battles: Battles) -> Array:
    """Shoot at the nearest enemy if it is in range, else walk toward it, as the enemies do."""
    allies, mask = battles.num_allies, battles.action_mask
    distance = np.where(battles.alive[:, None, allies:], battles.distance[:, :allies, allies:], np.inf)
    nearest = distance.argmin(-1)[..., None]
    offset = np.take_along_axis(battles.offset[:, :allies, allies:], nearest[..., None], -2)[..., 0, :]
    x, y = np.moveaxis(offset, -1, 0)
    walk = np.where(np.abs(x) > np.abs(y), np.where(x > 0, EAST, WEST), np.where(y > 0, NORTH, SOUTH))
    walk = np.where(np.take_along_axis(mask, walk[..., None], -1)[..., 0], walk, STOP)  # at the edge of the map
    actions = np.where(mask[..., ATTACK:].any(-1), ATTACK + nearest[..., 0], walk)
    return np.where(battles.alive[:, :allies], actions, NOOP)


def focus_fire(battles: Battles) -> Array:
    """Shoot at the weakest enemy in range that the agents before don't already kill.

    Among equally weak enemies, shoot at the one closest to the whole team.
    """
    allies = battles.num_allies
    actions = attack_nearest(battles)
    strength = (battles.health + battles.shield)[:, allies:]  # that remains after the shots of the agents before
    tie_break = 1e-3 * (battles.distance[:, :allies, allies:] * battles.alive[:, :allies, None]).sum(1)
    for agent in range(allies):
        in_range = battles.action_mask[:, agent, ATTACK:]
        cost = np.where(strength > 0, strength, 1e6) + tie_break  # enemies that die anyway come last
        target = np.where(in_range, cost, np.inf).argmin(-1)
        shoots = in_range.any(-1)
        actions[:, agent] = np.where(shoots, ATTACK + target, actions[:, agent])
        fires = (shoots & (battles.cooldown_left[:, agent] == 0)).nonzero()[0]
        strength[fires, target[fires]] -= battles.damage[agent]
    return actions


def random_play(battles: Battles, rng: np.random.Generator) -> Array:
    """Sample available actions uniformly."""
    actions: Array = np.where(battles.action_mask, rng.random(battles.action_mask.shape), -1.0).argmax(-1)
    return actions
