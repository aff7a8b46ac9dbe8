"""Observations and global states of battles, in SMAC's order and sizes (Samvelyan et al., 2019, section 4)."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from zhixing.envs.adapters.skirmish.battles import ATTACK, NORTH, WEST, Battles
from zhixing.envs.adapters.skirmish.units import SIGHT, SIZE
from zhixing.envs.vector.step_buffers import Array

NUM_MOVES = WEST - NORTH + 1
# features of one observed unit, followed by its one-hot type; FLAG: an enemy can be attacked, an ally is visible
FLAG, DISTANCE, X, Y, HEALTH, SHIELD, TYPES = range(7)
COOLDOWN = DISTANCE  # in the global state, which has no distances


class ObsBuilder:
    """Builds observations and states.

    All features go into one table per agent. `columns` [A, d] lists the table columns that make up each observation, so
    a single indexing operation builds the observations of all agents.
    """

    def __init__(self, battles: Battles) -> None:
        self.battles = battles
        self.num_features = TYPES + battles.unit_types.shape[1]
        allies, enemies = range(battles.num_allies), range(battles.num_allies, battles.num_units)
        types = list(range(TYPES, self.num_features))
        ally = [HEALTH, *([SHIELD] if battles.max_shield[list(allies)].any() else []), *types]
        enemy = [HEALTH, *([SHIELD] if battles.max_shield[list(enemies)].any() else []), *types]
        relative = [FLAG, DISTANCE, X, Y]
        self.columns = np.array(
            [
                [
                    *range(-NUM_MOVES, 0),
                    *self._columns(enemies, [*relative, *enemy]),
                    *self._columns([unit for unit in allies if unit != agent], [*relative, *ally]),
                    *self._columns([agent], ally),
                ]
                for agent in allies
            ]
        )  # the available moves are the last columns of the table
        self.agents = np.arange(len(allies))[:, None]
        self.state_columns = np.array(
            [
                *self._columns(allies, [HEALTH, COOLDOWN, X, Y, *ally[1:]]),
                *self._columns(enemies, [HEALTH, X, Y, *enemy[1:]]),
            ]
        )
        self.obs_size = self.columns.shape[1]
        self.state_size = len(self.state_columns) + len(allies) * battles.num_actions
        self._shield_scale = np.maximum(battles.max_shield, 1.0)  # avoids division by zero

    def _columns(self, units: Iterable[int], features: list[int]) -> list[int]:
        return [unit * self.num_features + feature for unit in units for feature in features]

    def observations(self, rows: Array | slice = slice(None)) -> Array:
        """Return observations [N,A,d]. Dead or invisible units are zeros, as is everything for dead agents."""
        battles, allies = self.battles, self.battles.num_allies
        distance, mask, alive = battles.distance[rows, :allies], battles.action_mask[rows], battles.alive[rows]
        visible = (distance <= SIGHT) & alive[:, None] & alive[:, :allies, None]  # [N,A,U]
        table = np.empty((len(alive), allies, battles.num_units * self.num_features + NUM_MOVES), np.float32)
        table[..., -NUM_MOVES:] = mask[..., NORTH:ATTACK]
        features = table[..., :-NUM_MOVES].reshape(*visible.shape, self.num_features)  # a view into the table
        features[..., :allies, FLAG], features[..., allies:, FLAG] = 1.0, mask[..., ATTACK:]
        features[..., DISTANCE] = distance / SIGHT
        features[..., X : Y + 1] = battles.offset[rows, :allies] / SIGHT
        features[..., HEALTH] = (battles.health[rows] / battles.max_health)[:, None]
        features[..., SHIELD] = (battles.shield[rows] / self._shield_scale)[:, None]
        features[..., TYPES:] = battles.unit_types
        features *= visible[..., None]
        obs: Array = table[:, self.agents, self.columns]
        return obs

    def states(self, rows: Array | slice = slice(None)) -> Array:
        """Return global states [N,S]: all living units, visible or not, and the allies' last actions."""
        battles = self.battles
        alive = battles.alive[rows]
        features = np.empty((*alive.shape, self.num_features), np.float32)
        features[..., FLAG] = 0.0  # not part of the state
        features[..., COOLDOWN] = battles.cooldown_left[rows] / battles.cooldown
        features[..., X : Y + 1] = battles.position[rows] / SIZE - 0.5
        features[..., HEALTH] = battles.health[rows] / battles.max_health
        features[..., SHIELD] = battles.shield[rows] / self._shield_scale
        features[..., TYPES:] = battles.unit_types
        features *= alive[..., None]
        last_actions = battles.last_actions[rows][..., None] == np.arange(battles.num_actions)
        units = features.reshape(len(alive), -1)[:, self.state_columns]
        return np.concatenate([units, last_actions.reshape(len(alive), -1)], 1, dtype=np.float32)
