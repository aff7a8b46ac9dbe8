"""Skirmish in torch: the computations of `Battles` and `ObsBuilder`, whose comments give the reasons, on tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from torch import Tensor

from zhixing.envs.adapters.skirmish.battles import ATTACK, JITTER, KILL, NORTH, WIN, Battles
from zhixing.envs.adapters.skirmish.observations import (
    COOLDOWN,
    DISTANCE,
    FLAG,
    HEALTH,
    NUM_MOVES,
    SHIELD,
    TYPES,
    ObsBuilder,
    X,
    Y,
)
from zhixing.envs.adapters.skirmish.units import MAPS, SIGHT, SIZE
from zhixing.envs.torch_native.env import TorchEnv, Transition, uniform

if TYPE_CHECKING:
    from typing_extensions import Self


class Geometry(NamedTuple):
    """Quantities derived from a state."""

    alive: Tensor  # [U,N]
    gap_x: Tensor  # [A,U,N], from ally to unit
    gap_y: Tensor
    distance: Tensor
    available: Tensor  # [A,n,N]


class Skirmish(TorchEnv):
    """Base class of the maps in `SKIRMISH_ENVS`.

    Rows of a state `[k,N]` are x, y, health, shield and cooldown of all units, allies first, then the allies' last
    actions. Rejecting an unavailable action would synchronize with the device. Instead it has no effect and counts as
    action 0.
    """

    options: ClassVar[frozenset[str]] = frozenset({"episode_limit"})
    logged_info_keys: ClassVar[tuple[str, ...]] = ("won",)
    terminated_excludes_truncated: ClassVar[bool] = True
    map_name: ClassVar[str]

    def __init__(self, episode_limit: int | None = None) -> None:
        self.battles = Battles(1, self.map_name, episode_limit)  # for the map's constants
        self.max_episode_steps = self.battles.episode_limit
        self.allies, self.units = self.battles.num_allies, self.battles.num_units
        self.rows = [self.units] * 5 + [self.allies]
        self.to(torch.device("cpu"))

    def to(self, device: torch.device) -> Self:
        battles, obs_builder = self.battles, ObsBuilder(self.battles)
        # double precision as in `Battles`: exact ties of distances are common, and rounding would break them
        self.dtype = torch.float64 if device.type in ("cpu", "cuda") else torch.float32

        def column(values: object) -> Tensor:  # [U,1] or [U,k,1]; all values are exact in single precision
            return torch.as_tensor(values, dtype=torch.float32, device=device).unsqueeze(-1)

        self.damage, self.cooldown, self.range = map(column, (battles.damage, battles.cooldown, battles.range))
        self.speed, self.start, self.types = map(column, (battles.speed, battles.start_positions, battles.unit_types))
        self.max_health, self.max_shield = column(battles.max_health), column(battles.max_shield)
        self.action_index = column(range(battles.num_actions))  # [n,1]
        self.width, wide = obs_builder.num_features, self.units * obs_builder.num_features + NUM_MOVES
        columns = obs_builder.columns % wide + wide * obs_builder.agents  # into all agents' concatenated feature tables
        self.columns = torch.as_tensor(columns.reshape(-1), device=device)
        self.state_columns = torch.as_tensor(obs_builder.state_columns, device=device)
        return self

    def initial_state(self, num_envs: int, rng: torch.Generator) -> Tensor:
        x, y = uniform(-JITTER, JITTER, (2, self.units, num_envs), rng) + self.start.movedim(1, 0)
        initial = torch.cat((self.max_health, self.max_shield, torch.zeros_like(self.speed)))
        no_action = torch.full_like(x[: self.allies], -1.0)
        return torch.cat((x, y, initial.expand(-1, num_envs), no_action)).to(self.dtype)

    def transition(self, state: Tensor, action: Tensor) -> Transition:
        allies, speed = self.allies, self.speed
        x, y, health, shield, wait, _ = state.split(self.rows)  # [U,N]
        alive, gap_x, gap_y, distance, available = self._geometry(state)
        actions = action.T.contiguous().to(state.dtype)  # [A,N]
        orders = (actions.unsqueeze(1) == self.action_index) & available  # [A,n,N]

        # enemies approach the nearest living ally
        ally_distance = distance[:, allies:].masked_fill(~alive[:allies].unsqueeze(1), torch.inf)  # [A,E,N]
        gap, nearest = ally_distance.min(0)  # [E,N]; ties go to the first ally
        in_range = gap <= self.range[allies:]
        walks = alive[allies:] & ~in_range & gap.isfinite()
        length = torch.maximum(gap, speed[allies:]).masked_fill(~walks, torch.inf)
        enemy_x, enemy_y = (-delta[:, allies:].gather(0, nearest.unsqueeze(0))[0] / length for delta in (gap_x, gap_y))

        ready = (wait == 0) & alive
        shots = orders[:, ATTACK:] & ready[:allies].unsqueeze(1)  # [A,E,N], ally at enemy
        enemy_shots = (nearest == self.action_index[:allies].unsqueeze(1)) & in_range & ready[allies:]  # enemy at ally
        damage = torch.cat(((enemy_shots * self.damage[allies:]).sum(1), (shots * self.damage[:allies, None]).sum(0)))
        absorbed = torch.minimum(shield, damage)
        shield_left, health_left = shield - absorbed, (health - (damage - absorbed)).clamp_min(0.0)
        fires = torch.cat((shots.any(1), enemy_shots.any(0)))
        wait = torch.where(fires, self.cooldown - 1.0, (wait - 1.0).clamp_min(0.0))
        north, south, east, west = orders[:, NORTH:ATTACK].to(state.dtype).unbind(1)
        x = (x + torch.cat((east - west, enemy_x)) * speed).clamp(0.0, SIZE)
        y = (y + torch.cat((north - south, enemy_y)) * speed).clamp(0.0, SIZE)
        last = actions * orders.any(1)

        survives = health_left > 0
        allies_left, enemies_left = survives[:allies].any(0), survives[allies:].any(0)
        dealt = (health + shield - health_left - shield_left)[allies:].sum(0)
        killed = (alive & ~survives)[allies:].sum(0)
        reward = (dealt + KILL * killed + WIN * (allies_left & ~enemies_left)) * self.battles.reward_scale  # [N]
        state = torch.cat((x, y, health_left, shield_left, wait, last))
        return Transition(state, reward.float().unsqueeze(-1).expand(-1, allies), ~(allies_left & enemies_left))

    def observe(self, state: Tensor) -> dict[str, Tensor]:
        allies, units, num = self.allies, self.units, state.shape[1]
        x, y, health, shield, wait, last = state.split(self.rows)
        alive, gap_x, gap_y, distance, available = self._geometry(state)
        health, shield = health / self.max_health, shield / self.max_shield.clamp_min(1.0)

        visible = ((distance <= SIGHT) & alive & alive[:allies].unsqueeze(1)).float()  # [A,U,N]
        table = visible.new_empty(allies, units * self.width + NUM_MOVES, num)
        table[:, -NUM_MOVES:] = available[:, NORTH:ATTACK]
        features = table[:, :-NUM_MOVES].unflatten(1, (units, self.width))
        features[:, :allies, FLAG], features[:, allies:, FLAG] = visible[:, :allies], available[:, ATTACK:]
        gaps = {DISTANCE: distance / SIGHT, X: gap_x / SIGHT, Y: gap_y / SIGHT}
        for feature, value in (gaps | {HEALTH: health, SHIELD: shield}).items():
            torch.mul(value, visible, out=features[:, :, feature])
        torch.mul(self.types, visible.unsqueeze(2), out=features[:, :, TYPES:])
        obs = table.flatten(0, 1).index_select(0, self.columns)  # [A*d,N]

        units_table = visible.new_zeros(units, self.width, num)
        units_table[:, COOLDOWN] = wait / self.cooldown
        units_table[:, X], units_table[:, Y], units_table[:, HEALTH], units_table[:, SHIELD] = (
            x / SIZE - 0.5,
            y / SIZE - 0.5,
            health,
            shield,
        )
        units_table[:, TYPES:] = self.types
        units_table *= alive.unsqueeze(1)
        last_action = (last.unsqueeze(1) == self.action_index).flatten(0, 1)
        return {
            "obs": _envs_first(obs).unflatten(1, (allies, -1)),
            "mask": _envs_first(available.flatten(0, 1)).unflatten(1, (allies, -1)),
            "state": _envs_first(
                torch.cat((units_table.flatten(0, 1).index_select(0, self.state_columns), last_action))
            ),
            "alive": _envs_first(alive[:allies]),
        }

    def info(self, state: Tensor) -> dict[str, Tensor]:
        alive = state.split(self.rows)[2] > 0
        allies, enemies = alive[: self.allies], alive[self.allies :]
        return {
            "won": allies.any(0) & ~enemies.any(0),
            "dead_allies": (~allies).sum(0),
            "dead_enemies": (~enemies).sum(0),
        }

    def _geometry(self, state: Tensor) -> Geometry:
        allies = self.allies
        x, y, health, *_ = state.split(self.rows)
        alive = health > 0
        ally_alive, speed = alive[:allies], self.speed[:allies]
        gap_x, gap_y = x - x[:allies].unsqueeze(1), y - y[:allies].unsqueeze(1)
        distance = (gap_x.square() + gap_y.square()).sqrt()
        north, south = y[:allies] + speed <= SIZE, y[:allies] - speed >= 0
        east, west = x[:allies] + speed <= SIZE, x[:allies] - speed >= 0
        moves = torch.stack((~ally_alive, ally_alive, *(free & ally_alive for free in (north, south, east, west))), 1)
        attacks = (distance[:, allies:] <= self.range[:allies, None]) & ally_alive.unsqueeze(1) & alive[allies:]
        return Geometry(alive, gap_x, gap_y, distance, torch.cat((moves, attacks), 1))


def _envs_first(rows: Tensor) -> Tensor:
    """Transpose `[k,N]` to `[N,k]`, also in memory. Transposing two dimensions is faster than permuting more."""
    return rows.T.contiguous()


SKIRMISH_ENVS: dict[str, type[TorchEnv]] = {
    f"skirmish/{name}": type(f"Skirmish_{name}", (Skirmish,), {"map_name": name}) for name in MAPS
}
