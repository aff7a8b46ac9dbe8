"""The rules: many battles of one map at once, as arrays [N, units], allies first."""

from __future__ import annotations

from typing import Any

import numpy as np

from zhixing.envs.adapters.skirmish.units import MAPS, SIZE, UNITS
from zhixing.envs.vector.step_buffers import Array
from zhixing.errors import UserError, unknown

NOOP, STOP, NORTH, SOUTH, EAST, WEST, ATTACK = range(7)  # ATTACK + i attacks enemy i
DIRECTIONS = np.array([[0, 0], [0, 0], [0, 1], [0, -1], [1, 0], [-1, 0], [0, 0]], float)  # by action; attackers stay
KILL, WIN, BEST_RETURN = 10.0, 200.0, 20.0
GAP, SPACING, JITTER = 14.0, 1.5, 1.0  # at the start: between the two lines, between units of a line, how far off it
KEPT = ("place", "health", "shield", "wait", "last", "steps")


class Battles:
    """Orders are carried out at once: shots hit what was in range at the start of the step, the dead of a step have
    still fired in it. Health and damage are whole numbers, so that results are the same for any number of battles.
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
        self.types = np.array([[letter == kind for kind in self.map.types] for letter in letters], np.float32)
        self.start = np.concatenate([_line(self.num_allies, -GAP / 2), _line(self.num_enemies, GAP / 2)])
        enemies = self.max_health[self.num_allies :] + self.max_shield[self.num_allies :]
        self.reward_scale = BEST_RETURN / (enemies.sum() + KILL * self.num_enemies + WIN)

        shape = num, self.num_units
        self.rng = np.random.default_rng()
        self.place, self.health, self.shield = np.zeros((*shape, 2)), np.zeros(shape), np.zeros(shape)
        self.wait = np.zeros(shape)  # steps until the weapon is ready
        self.last = np.full((num, self.num_allies), -1)  # the allies' actions of the step before; -1 at the start
        self.steps = np.zeros(num, np.int64)
        # follow from the above, see `_look`: kept because rules, observations and scripts all need them
        self.alive = np.zeros(shape, bool)
        self.gap = np.zeros((*shape, self.num_units, 2))  # [n, i, j] from unit i to unit j
        self.distance = np.zeros((*shape, self.num_units))
        self.available = np.zeros((num, self.num_allies, self.num_actions), bool)
        self._unit_offset = np.arange(num)[:, None] * self.num_units

    def begin(self, rows: Array) -> None:
        """New battles in these rows."""
        self.place[rows] = self.start + self.rng.uniform(-JITTER, JITTER, (len(rows), self.num_units, 2))
        self.health[rows], self.shield[rows] = self.max_health, self.max_shield
        self.wait[rows], self.last[rows], self.steps[rows] = 0, -1, 0
        self._look(rows)

    def step(self, actions: Array) -> tuple[Array, Array, Array]:
        """Of actions [N,A]: the team's reward, terminated and truncated, each [N]."""
        allies = self.num_allies
        self._check(actions)
        target = np.empty((self.num, self.num_units), np.int64)  # whom a unit shoots at, -1 for no one
        target[:, :allies] = np.where(actions >= ATTACK, actions - ATTACK + allies, -1)
        move = np.empty_like(self.place)
        move[:, :allies] = DIRECTIONS[np.minimum(actions, ATTACK)]
        target[:, allies:], move[:, allies:] = self._enemy_orders()

        fires = (target >= 0) & (self.wait == 0) & self.alive
        hits = (target + self._unit_offset)[fires]
        shots = np.broadcast_to(self.damage, fires.shape)[fires]
        hurt = np.bincount(hits, shots, fires.size).reshape(fires.shape)
        stood, strength = self.alive[:, allies:].copy(), (self.health + self.shield)[:, allies:].sum(1)
        absorbed = np.minimum(self.shield, hurt)
        self.shield -= absorbed
        self.health = np.maximum(self.health - (hurt - absorbed), 0.0)
        self.wait = np.where(fires, self.cooldown - 1, np.maximum(self.wait - 1, 0.0))
        self.place = np.clip(self.place + move * self.speed[:, None], 0.0, SIZE)
        self.last, self.steps = np.array(actions, np.int64), self.steps + 1
        self._look(slice(None))

        stands = self.alive[:, allies:]
        dealt = strength - (self.health + self.shield)[:, allies:].sum(1)
        reward = (dealt + KILL * (stood & ~stands).sum(1) + WIN * self.won) * self.reward_scale
        terminated = np.logical_not(stands.any(1) & self.alive[:, :allies].any(1))
        return reward, terminated, (self.steps >= self.episode_limit) & ~terminated

    @property
    def won(self) -> Array:
        """All enemies are dead and not all allies: who falls together hasn't won."""
        return self.alive[:, : self.num_allies].any(1) > self.alive[:, self.num_allies :].any(1)

    def numbers(self, row: int) -> dict[str, int | float | bool]:
        """What is told of a battle that ended."""
        alive = self.alive[row]
        dead_allies, dead_enemies = (int((~team).sum()) for team in np.split(alive, [self.num_allies]))
        return {"won": bool(self.won[row]), "dead_allies": dead_allies, "dead_enemies": dead_enemies}

    def state_dict(self) -> dict[str, Any]:
        arrays = {name: getattr(self, name).copy() for name in KEPT}
        return {**arrays, "rng": dict(self.rng.bit_generator.state)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in KEPT:
            setattr(self, name, np.array(state[name]))
        self.rng.bit_generator.state = state["rng"]
        self._look(slice(None))

    def _enemy_orders(self) -> tuple[Array, Array]:
        """Targets [N,E] and directions [N,E,2]: each goes for the nearest living ally and shoots once in range."""
        allies = self.num_allies
        alive = self.alive[:, allies:]
        far = np.where(self.alive[:, None, :allies], self.distance[:, allies:, :allies], np.inf)
        nearest = far.argmin(-1)
        distance = np.take_along_axis(far, nearest[..., None], -1)[..., 0]
        gap = np.take_along_axis(self.gap[:, allies:, :allies], nearest[..., None, None], -2)[..., 0, :]
        in_range = distance <= self.range[allies:]
        goes = alive & ~in_range & np.isfinite(distance)
        # never past the target: the last stride is as short as the way
        length = np.where(goes, np.maximum(distance, self.speed[allies:]), np.inf)
        return np.where(alive & in_range, nearest, -1), gap / length[..., None]

    def _look(self, rows: Array | slice) -> None:
        """Bring up to date what follows from places and health."""
        allies = self.num_allies
        place, alive = self.place[rows], self.health[rows] > 0
        gap = place[:, None] - place[:, :, None]
        distance = np.sqrt(np.square(gap).sum(-1))
        mask = np.empty((len(place), allies, self.num_actions), bool)
        here, lives = place[:, :allies], alive[:, :allies]
        mask[..., NOOP], mask[..., STOP] = ~lives, lives
        room = here + self.speed[:allies, None] <= SIZE, here - self.speed[:allies, None] >= 0  # [N,A,2] each
        mask[..., NORTH], mask[..., SOUTH] = room[0][..., 1] & lives, room[1][..., 1] & lives
        mask[..., EAST], mask[..., WEST] = room[0][..., 0] & lives, room[1][..., 0] & lives
        in_range = distance[:, :allies, allies:] <= self.range[:allies, None]
        mask[..., ATTACK:] = in_range & lives[..., None] & alive[:, None, allies:]
        self.alive[rows], self.gap[rows], self.distance[rows], self.available[rows] = alive, gap, distance, mask

    def _check(self, actions: Array) -> None:
        if actions.shape != self.last.shape:
            raise ValueError(f"actions have the shape {actions.shape}, not {self.last.shape} (battles, agents)")
        fine = (actions >= 0) & (actions < self.num_actions)
        fine &= np.take_along_axis(self.available, np.where(fine, actions, 0)[..., None], -1)[..., 0]
        if not fine.all():
            row, agent = np.argwhere(~fine)[0]
            allowed = ", ".join(map(str, self.available[row, agent].nonzero()[0]))
            raise ValueError(f"battle {row}, agent {agent}: action {actions[row, agent]} isn't one of {allowed}")


def _line(num: int, x: float) -> Array:
    """Places of a team from north to south."""
    return SIZE / 2 + np.stack([np.full(num, x), SPACING * ((num - 1) / 2 - np.arange(num))], 1)
