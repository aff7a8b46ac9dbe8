"""What agents and critics see of battles, in SMAC's order and with its sizes (Samvelyan et al., 2019, section 4)."""

from __future__ import annotations

import numpy as np

from zhixing.envs.arrays import Array
from zhixing.envs.skirmish.battles import NORTH, WEST, Battles
from zhixing.envs.skirmish.units import SIGHT, SIZE

MOVES = WEST - NORTH + 1


class Views:
    """Tables of which features of which unit stand where; then one look-up makes all observations."""

    def __init__(self, battles: Battles) -> None:
        self.battles = battles
        allies, units, kinds = battles.num_allies, battles.num_units, battles.types.shape[1]
        ally_shield, enemy_shield = battles.max_shield[:allies].any(), battles.max_shield[allies:].any()
        kind_features = list(range(6, 6 + kinds))
        # of a unit that an agent sees: 0 can be attacked (ally: is seen), 1 distance, 2 x, 3 y, 4 health, 5 shield, type
        self.width = 6 + kinds
        seen_ally = [0, 1, 2, 3, 4, *([5] if ally_shield else []), *kind_features]
        seen_enemy = [0, 1, 2, 3, 4, *([5] if enemy_shield else []), *kind_features]
        self.columns = np.array(
            [
                [
                    *range(MOVES),
                    *self._of(range(allies, units), seen_enemy),
                    *self._of((other for other in range(allies) if other != agent), seen_ally),
                    *self._of([agent], seen_ally[4:]),
                ]
                for agent in range(allies)
            ]
        )  # [A, d] into the moves and the features of all units
        self.agents = np.arange(allies)[:, None]
        # of a unit in the state: 0 health, 1 cooldown, 2 x, 3 y, 5 shield, type
        state_ally = [0, 1, 2, 3, *([5] if ally_shield else []), *kind_features]
        state_enemy = [0, 2, 3, *([5] if enemy_shield else []), *kind_features]
        self.state_columns = np.array(
            [*self._of(range(allies), state_ally), *self._of(range(allies, units), state_enemy)]
        )
        self.state_columns -= MOVES
        self.obs_size = self.columns.shape[1]
        self.state_size = len(self.state_columns) + allies * battles.num_actions

    def _of(self, units: "range | list[int] | object", features: list[int]) -> list[int]:
        return [MOVES + unit * self.width + feature for unit in units for feature in features]  # type: ignore

    def observations(self, rows: Array | slice = slice(None)) -> Array:
        """[N,A,d]. Zeros for what is dead or out of sight, and for the dead themselves."""
        b = self.battles
        allies = b.num_allies
        distance, mask, alive = b.distance[rows, :allies], b.available[rows], b.alive[rows]
        seen = (distance <= SIGHT) & alive[:, None] & alive[:, :allies, None]  # [N,A,U]
        table = np.empty((len(alive), allies, MOVES + b.num_units * self.width), np.float32)
        table[..., :MOVES] = mask[..., NORTH : WEST + 1]
        features = table[..., MOVES:].reshape(*seen.shape, self.width)
        features[..., :allies, 0], features[..., allies:, 0] = 1.0, mask[..., WEST + 1 :]
        features[..., 1] = distance / SIGHT
        features[..., 2:4] = b.gap[rows, :allies] / SIGHT
        features[..., 4] = (b.health[rows] / b.max_health)[:, None]
        features[..., 5] = (b.shield[rows] / np.maximum(b.max_shield, 1))[:, None]
        features[..., 6:] = b.types
        features *= seen[..., None]
        return table[:, self.agents, self.columns]

    def states(self, rows: Array | slice = slice(None)) -> Array:
        """[N,S]: all units, whoever sees them, and the allies' last actions."""
        b = self.battles
        alive = b.alive[rows]
        features = np.empty((*alive.shape, self.width), np.float32)
        features[..., 0] = b.health[rows] / b.max_health
        features[..., 1] = b.wait[rows] / b.cooldown
        features[..., 2:4] = b.place[rows] / SIZE - 0.5
        features[..., 4] = 0.0
        features[..., 5] = b.shield[rows] / np.maximum(b.max_shield, 1)
        features[..., 6:] = b.types
        features *= alive[..., None]
        last = b.last[rows][..., None] == np.arange(b.num_actions)
        units = features.reshape(len(alive), -1)[:, self.state_columns]
        return np.concatenate([units, last.reshape(len(alive), -1)], 1, dtype=np.float32)
