"""What agents and critics see of battles, in SMAC's order and with its sizes (Samvelyan et al., 2019, section 4)."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from zhixing.envs.adapters.skirmish.battles import ATTACK, NORTH, WEST, Battles
from zhixing.envs.adapters.skirmish.units import SIGHT, SIZE
from zhixing.envs.vector.step_buffers import Array

MOVES = WEST - NORTH + 1
# features of a unit as an agent sees it; FLAG: can be attacked (enemy), is seen (ally). One per type follows.
FLAG, DISTANCE, X, Y, HEALTH, SHIELD, TYPES = range(7)
COOLDOWN = DISTANCE  # in the state, which has no distances


class Views:
    """Tables say which feature of which unit stands where; then one look-up makes all observations."""

    def __init__(self, battles: Battles) -> None:
        self.battles = battles
        self.width = TYPES + battles.types.shape[1]
        allies, enemies = range(battles.num_allies), range(battles.num_allies, battles.num_units)
        kinds = list(range(TYPES, self.width))
        ally = [HEALTH, *([SHIELD] if battles.max_shield[list(allies)].any() else []), *kinds]
        enemy = [HEALTH, *([SHIELD] if battles.max_shield[list(enemies)].any() else []), *kinds]
        where = [FLAG, DISTANCE, X, Y]
        self.columns = np.array(
            [
                [
                    *range(-MOVES, 0),
                    *self._columns(enemies, [*where, *enemy]),
                    *self._columns([other for other in allies if other != agent], [*where, *ally]),
                    *self._columns([agent], ally),
                ]
                for agent in allies
            ]
        )  # [A, d]; the moves stand at the end of the table
        self.agents = np.arange(len(allies))[:, None]
        self.state_columns = np.array(
            [
                *self._columns(allies, [HEALTH, COOLDOWN, X, Y, *ally[1:]]),
                *self._columns(enemies, [HEALTH, X, Y, *enemy[1:]]),
            ]
        )
        self.obs_size = self.columns.shape[1]
        self.state_size = len(self.state_columns) + len(allies) * battles.num_actions
        self._most_shield = np.maximum(battles.max_shield, 1.0)  # nothing is divided by zero

    def _columns(self, units: Iterable[int], features: list[int]) -> list[int]:
        return [unit * self.width + feature for unit in units for feature in features]

    def observations(self, rows: Array | slice = slice(None)) -> Array:
        """[N,A,d]. Zeros for what is dead or out of sight, and for all that the dead see."""
        b, allies = self.battles, self.battles.num_allies
        distance, available, alive = b.distance[rows, :allies], b.available[rows], b.alive[rows]
        seen = (distance <= SIGHT) & alive[:, None] & alive[:, :allies, None]  # [N,A,U]
        table = np.empty((len(alive), allies, b.num_units * self.width + MOVES), np.float32)
        table[..., -MOVES:] = available[..., NORTH:ATTACK]
        features = table[..., :-MOVES].reshape(*seen.shape, self.width)  # a view: what it gets, the table gets
        features[..., :allies, FLAG], features[..., allies:, FLAG] = 1.0, available[..., ATTACK:]
        features[..., DISTANCE] = distance / SIGHT
        features[..., X : Y + 1] = b.gap[rows, :allies] / SIGHT
        features[..., HEALTH] = (b.health[rows] / b.max_health)[:, None]
        features[..., SHIELD] = (b.shield[rows] / self._most_shield)[:, None]
        features[..., TYPES:] = b.types
        features *= seen[..., None]
        shown: Array = table[:, self.agents, self.columns]
        return shown

    def states(self, rows: Array | slice = slice(None)) -> Array:
        """[N,S]: all living units, seen or not, and the allies' last actions."""
        b = self.battles
        alive = b.alive[rows]
        features = np.empty((*alive.shape, self.width), np.float32)
        features[..., FLAG] = 0.0  # in no column
        features[..., COOLDOWN] = b.wait[rows] / b.cooldown
        features[..., X : Y + 1] = b.place[rows] / SIZE - 0.5
        features[..., HEALTH] = b.health[rows] / b.max_health
        features[..., SHIELD] = b.shield[rows] / self._most_shield
        features[..., TYPES:] = b.types
        features *= alive[..., None]
        last = b.last[rows][..., None] == np.arange(b.num_actions)
        units = features.reshape(len(alive), -1)[:, self.state_columns]
        return np.concatenate([units, last.reshape(len(alive), -1)], 1, dtype=np.float32)
