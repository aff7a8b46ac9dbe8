"""The rules of skirmish: N battles on one map, as arrays [N, units] with the allies first."""

from __future__ import annotations

from typing import Any

import numpy as np

from zhixing.envs.adapters.skirmish.units import MAPS, SIZE, UNITS
from zhixing.envs.vector.step_buffers import Array
from zhixing.errors import UserError, unknown

NOOP, STOP, NORTH, SOUTH, EAST, WEST, ATTACK = range(7)  # ATTACK + i attacks enemy i
DIRECTIONS = np.array([[0, 0], [0, 0], [0, 1], [0, -1], [1, 0], [-1, 0], [0, 0]], float)  # by action; attackers stay
KILL, WIN, BEST_RETURN = 10.0, 200.0, 20.0
GAP, SPACING, JITTER = 14.0, 1.5, 1.0  # at the start: between the lines, between neighbors, random offset of a unit
STATE_KEYS = ("position", "health", "shield", "cooldown_left", "last_actions", "steps")


class Battles:
    """N battles on one map.

    All orders of a step are simultaneous: a shot hits a target that was in range at the start of the step, and a unit
    that dies in a step still fires. Health and damage are integers, so results don't depend on the number of battles.
    """

    def __init__(self, num: int, map_name: str, episode_limit: int | None = None) -> None:
        if map_name not in MAPS:
            raise unknown("map", map_name, MAPS)
        self.num, self.map = num, MAPS[map_name]
        self.episode_limit = self.map.episode_limit if episode_limit is None else episode_limit
        if self.episode_limit < 1:
            raise UserError(f"env.episode_limit={episode_limit}: a battle needs at least 1 step")
        letters = self.map.allies + self.map.enemies
        units = [UNITS[letter] for letter in letters]
        self.num_allies, self.num_enemies, self.num_units = len(self.map.allies), len(self.map.enemies), len(letters)
        self.num_actions = ATTACK + self.num_enemies
        self.max_health, self.max_shield, self.damage, self.cooldown, self.range, self.speed = (
            np.array([getattr(unit, name) for unit in units], float)
            for name in ("health", "shield", "damage", "cooldown", "range", "speed")
        )
        self.unit_types = np.array([[letter == kind for kind in self.map.types] for letter in letters], np.float32)
        self.start_positions = np.concatenate([_line(self.num_allies, -GAP / 2), _line(self.num_enemies, GAP / 2)])
        enemy_strength = self.max_health[self.num_allies :] + self.max_shield[self.num_allies :]
        self.reward_scale = BEST_RETURN / (enemy_strength.sum() + KILL * self.num_enemies + WIN)

        shape = num, self.num_units
        self.rng = np.random.default_rng()
        self.position, self.health, self.shield = np.zeros((*shape, 2)), np.zeros(shape), np.zeros(shape)
        self.cooldown_left = np.zeros(shape)  # steps until the weapon is ready
        self.last_actions = np.full((num, self.num_allies), -1)  # of the allies; -1 at the start
        self.steps = np.zeros(num, np.int64)
        # derived from the arrays above by `_update_derived`; rules, observations and scripted teams all need them
        self.alive = np.zeros(shape, bool)
        self.offset = np.zeros((*shape, self.num_units, 2))  # [n, i, j] from unit i to unit j
        self.distance = np.zeros((*shape, self.num_units))
        self.action_mask = np.zeros((num, self.num_allies, self.num_actions), bool)
        self._first_unit = np.arange(num)[:, None] * self.num_units  # index of a battle's first unit among all units

    def reset(self, rows: Array) -> None:
        """Start new battles in these rows."""
        self.position[rows] = self.start_positions + self.rng.uniform(-JITTER, JITTER, (len(rows), self.num_units, 2))
        self.health[rows], self.shield[rows] = self.max_health, self.max_shield
        self.cooldown_left[rows], self.last_actions[rows], self.steps[rows] = 0, -1, 0
        self._update_derived(rows)

    def step(self, actions: Array) -> tuple[Array, Array, Array]:
        """Apply actions [N,A]. Return the team's reward, terminated and truncated, each [N]."""
        allies = self.num_allies
        self._check(actions)
        target = np.empty((self.num, self.num_units), np.int64)  # the unit to shoot at, or -1
        target[:, :allies] = np.where(actions >= ATTACK, actions - ATTACK + allies, -1)
        move = np.empty_like(self.position)
        move[:, :allies] = DIRECTIONS[np.minimum(actions, ATTACK)]
        target[:, allies:], move[:, allies:] = self._enemy_orders()

        fires = (target >= 0) & (self.cooldown_left == 0) & self.alive
        hits = (target + self._first_unit)[fires]
        shots = np.broadcast_to(self.damage, fires.shape)[fires]
        damage = np.bincount(hits, shots, fires.size).reshape(fires.shape)
        alive_before, strength_before = self.alive[:, allies:].copy(), (self.health + self.shield)[:, allies:].sum(1)
        absorbed = np.minimum(self.shield, damage)
        self.shield -= absorbed
        self.health = np.maximum(self.health - (damage - absorbed), 0.0)
        self.cooldown_left = np.where(fires, self.cooldown - 1, np.maximum(self.cooldown_left - 1, 0.0))
        self.position = np.clip(self.position + move * self.speed[:, None], 0.0, SIZE)
        self.last_actions, self.steps = np.array(actions, np.int64), self.steps + 1
        self._update_derived(slice(None))

        enemies_alive = self.alive[:, allies:]
        damage_dealt = strength_before - (self.health + self.shield)[:, allies:].sum(1)
        kills = (alive_before & ~enemies_alive).sum(1)
        reward = (damage_dealt + KILL * kills + WIN * self.won) * self.reward_scale
        terminated = np.logical_not(enemies_alive.any(1) & self.alive[:, :allies].any(1))
        return reward, terminated, (self.steps >= self.episode_limit) & ~terminated

    @property
    def won(self) -> Array:
        """Whether all enemies are dead and at least one ally is alive, [N]."""
        return self.alive[:, : self.num_allies].any(1) > self.alive[:, self.num_allies :].any(1)

    def final_info(self, row: int) -> dict[str, int | float | bool]:
        """Return the info of a finished battle."""
        alive = self.alive[row]
        dead_allies, dead_enemies = (int((~team).sum()) for team in np.split(alive, [self.num_allies]))
        return {"won": bool(self.won[row]), "dead_allies": dead_allies, "dead_enemies": dead_enemies}

    def state_dict(self) -> dict[str, Any]:
        arrays = {name: getattr(self, name).copy() for name in STATE_KEYS}
        return {**arrays, "rng": dict(self.rng.bit_generator.state)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in STATE_KEYS:
            setattr(self, name, np.array(state[name]))
        self.rng.bit_generator.state = state["rng"]
        self._update_derived(slice(None))

    def _enemy_orders(self) -> tuple[Array, Array]:
        """Return targets [N,E] and directions [N,E,2]. Enemies walk to the nearest living ally and shoot in range."""
        allies = self.num_allies
        alive = self.alive[:, allies:]
        distances = np.where(self.alive[:, None, :allies], self.distance[:, allies:, :allies], np.inf)
        nearest = distances.argmin(-1)
        distance = np.take_along_axis(distances, nearest[..., None], -1)[..., 0]
        offset = np.take_along_axis(self.offset[:, allies:, :allies], nearest[..., None, None], -2)[..., 0, :]
        in_range = distance <= self.range[allies:]
        walks = alive & ~in_range & np.isfinite(distance)
        # the last stride is shorter, so an enemy never walks past its target
        length = np.where(walks, np.maximum(distance, self.speed[allies:]), np.inf)
        return np.where(alive & in_range, nearest, -1), offset / length[..., None]

    def _update_derived(self, rows: Array | slice) -> None:
        """Recompute `alive`, `offset`, `distance` and `action_mask` from positions and health."""
        allies = self.num_allies
        position, alive = self.position[rows], self.health[rows] > 0
        offset = position[:, None] - position[:, :, None]
        distance = np.sqrt(np.square(offset).sum(-1))
        mask = np.empty((len(position), allies, self.num_actions), bool)
        ally_position, ally_alive = position[:, :allies], alive[:, :allies]
        mask[..., NOOP], mask[..., STOP] = ~ally_alive, ally_alive
        speed = self.speed[:allies, None]
        room_up, room_down = ally_position + speed <= SIZE, ally_position - speed >= 0  # [N,A,2] each, for x and y
        mask[..., NORTH], mask[..., SOUTH] = room_up[..., 1] & ally_alive, room_down[..., 1] & ally_alive
        mask[..., EAST], mask[..., WEST] = room_up[..., 0] & ally_alive, room_down[..., 0] & ally_alive
        in_range = distance[:, :allies, allies:] <= self.range[:allies, None]
        mask[..., ATTACK:] = in_range & ally_alive[..., None] & alive[:, None, allies:]
        self.alive[rows], self.offset[rows], self.distance[rows], self.action_mask[rows] = alive, offset, distance, mask

    def _check(self, actions: Array) -> None:
        if actions.shape != self.last_actions.shape:
            raise ValueError(
                f"actions have shape {actions.shape}; expected {self.last_actions.shape} (battles, agents)"
            )
        valid = (actions >= 0) & (actions < self.num_actions)
        valid &= np.take_along_axis(self.action_mask, np.where(valid, actions, 0)[..., None], -1)[..., 0]
        if not valid.all():
            row, agent = np.argwhere(~valid)[0]
            allowed = ", ".join(map(str, self.action_mask[row, agent].nonzero()[0]))
            action = actions[row, agent]
            raise ValueError(f"battle {row}, agent {agent}: action {action} is not available; allowed are {allowed}")


def _line(num: int, x: float) -> Array:
    """Return the start positions of a team, from north to south."""
    return SIZE / 2 + np.stack([np.full(num, x), SPACING * ((num - 1) / 2 - np.arange(num))], 1)
