"""Skirmish: what `Battles` and `ObsBuilder` do in NumPy, whose comments say why, for battles side by side in rows."""

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
from zhixing.envs.torch_native.env import Moved, TorchEnv, uniform

if TYPE_CHECKING:
    from typing_extensions import Self


class Look(NamedTuple):
    """What follows from a state."""

    alive: Tensor  # [U,N]
    gap_x: Tensor  # [A,U,N] from ally to unit
    gap_y: Tensor
    distance: Tensor
    available: Tensor  # [A,n,N]


class Skirmish(TorchEnv):
    """One map of it; `SKIRMISHES` has a class for each.

    Rows of a state `[k,N]` are x, y, health, shield and cooldown of all units, allies first, then the allies' last
    actions. An action that isn't available can't be refused without waiting for the device: it does nothing, and
    counts as action 0.
    """

    options: ClassVar[frozenset[str]] = frozenset({"episode_limit"})
    logged_info_keys: ClassVar[tuple[str, ...]] = ("won",)
    ends_once: ClassVar[bool] = True
    map_name: ClassVar[str]

    def __init__(self, episode_limit: int | None = None) -> None:
        self.battles = Battles(1, self.map_name, episode_limit)  # for its figures
        self.limit = self.battles.episode_limit
        self.allies, self.units = self.battles.num_allies, self.battles.num_units
        self.rows = [self.units] * 5 + [self.allies]
        self.to(torch.device("cpu"))

    def to(self, device: torch.device) -> Self:
        battles, obs_builder = self.battles, ObsBuilder(self.battles)
        # double as in `Battles`: ties aren't rare, such as a zealot on its target, which walks off as far as it reaches
        self.dtype = torch.float64 if device.type in ("cpu", "cuda") else torch.float32

        def column(values: object) -> Tensor:  # [U,1], or [U,k,1]; all of them are exact in single precision
            return torch.as_tensor(values, dtype=torch.float32, device=device).unsqueeze(-1)

        self.damage, self.cooldown, self.range = map(column, (battles.damage, battles.cooldown, battles.range))
        self.speed, self.start, self.types = map(column, (battles.speed, battles.start_positions, battles.unit_types))
        self.max_health, self.max_shield = column(battles.max_health), column(battles.max_shield)
        self.numbered = column(range(battles.num_actions))  # [n,1]
        self.width, wide = obs_builder.num_features, self.units * obs_builder.num_features + NUM_MOVES
        columns = obs_builder.columns % wide + wide * obs_builder.agents  # in all agents' tables, one after the other
        self.columns = torch.as_tensor(columns.reshape(-1), device=device)
        self.state_columns = torch.as_tensor(obs_builder.state_columns, device=device)
        return self

    def first(self, num: int, rng: torch.Generator) -> Tensor:
        x, y = uniform(-JITTER, JITTER, (2, self.units, num), rng) + self.start.movedim(1, 0)
        strength = torch.cat((self.max_health, self.max_shield, torch.zeros_like(self.speed)))
        never = torch.full_like(x[: self.allies], -1.0)
        return torch.cat((x, y, strength.expand(-1, num), never)).to(self.dtype)

    def move(self, state: Tensor, action: Tensor) -> Moved:
        allies, speed = self.allies, self.speed
        x, y, health, shield, wait, _ = state.split(self.rows)  # [U,N]
        alive, gap_x, gap_y, distance, available = self._look(state)
        asked = action.T.contiguous().to(state.dtype)  # [A,N]
        orders = (asked.unsqueeze(1) == self.numbered) & available  # [A,n,N]

        # enemies go for the nearest living ally
        far = distance[:, allies:].masked_fill(~alive[:allies].unsqueeze(1), torch.inf)  # [A,E,N]
        way, nearest = far.min(0)  # [E,N]; of equals the first
        in_range = way <= self.range[allies:]
        goes = alive[allies:] & ~in_range & way.isfinite()
        length = torch.maximum(way, speed[allies:]).masked_fill(~goes, torch.inf)
        go_x, go_y = (-gap[:, allies:].gather(0, nearest.unsqueeze(0))[0] / length for gap in (gap_x, gap_y))

        ready = (wait == 0) & alive
        shots = orders[:, ATTACK:] & ready[:allies].unsqueeze(1)  # [A,E,N] of ally at enemy
        answers = (nearest == self.numbered[:allies].unsqueeze(1)) & in_range & ready[allies:]  # the other way round
        hurt = torch.cat(((answers * self.damage[allies:]).sum(1), (shots * self.damage[:allies, None]).sum(0)))
        absorbed = torch.minimum(shield, hurt)
        shield_left, health_left = shield - absorbed, (health - (hurt - absorbed)).clamp_min(0.0)
        fires = torch.cat((shots.any(1), answers.any(0)))
        wait = torch.where(fires, self.cooldown - 1.0, (wait - 1.0).clamp_min(0.0))
        north, south, east, west = orders[:, NORTH:ATTACK].to(state.dtype).unbind(1)
        x = (x + torch.cat((east - west, go_x)) * speed).clamp(0.0, SIZE)
        y = (y + torch.cat((north - south, go_y)) * speed).clamp(0.0, SIZE)
        last = asked * orders.any(1)

        stands = health_left > 0
        we, they = stands[:allies].any(0), stands[allies:].any(0)
        dealt = (health + shield - health_left - shield_left)[allies:].sum(0)
        killed = (alive & ~stands)[allies:].sum(0)
        reward = (dealt + KILL * killed + WIN * (we & ~they)) * self.battles.reward_scale  # [N]
        state = torch.cat((x, y, health_left, shield_left, wait, last))
        return Moved(state, reward.float().unsqueeze(-1).expand(-1, allies), ~(we & they))

    def observe(self, state: Tensor) -> dict[str, Tensor]:
        allies, units, num = self.allies, self.units, state.shape[1]
        x, y, health, shield, wait, last = state.split(self.rows)
        alive, gap_x, gap_y, distance, available = self._look(state)
        health, shield = health / self.max_health, shield / self.max_shield.clamp_min(1.0)

        seen = ((distance <= SIGHT) & alive & alive[:allies].unsqueeze(1)).float()  # [A,U,N]
        table = seen.new_empty(allies, units * self.width + NUM_MOVES, num)
        table[:, -NUM_MOVES:] = available[:, NORTH:ATTACK]
        features = table[:, :-NUM_MOVES].unflatten(1, (units, self.width))
        features[:, :allies, FLAG], features[:, allies:, FLAG] = seen[:, :allies], available[:, ATTACK:]
        gaps = {DISTANCE: distance / SIGHT, X: gap_x / SIGHT, Y: gap_y / SIGHT}
        for feature, value in (gaps | {HEALTH: health, SHIELD: shield}).items():
            torch.mul(value, seen, out=features[:, :, feature])
        torch.mul(self.types, seen.unsqueeze(2), out=features[:, :, TYPES:])
        obs = table.flatten(0, 1).index_select(0, self.columns)  # [A d,N]

        whole = seen.new_zeros(units, self.width, num)
        whole[:, COOLDOWN] = wait / self.cooldown
        whole[:, X], whole[:, Y], whole[:, HEALTH], whole[:, SHIELD] = x / SIZE - 0.5, y / SIZE - 0.5, health, shield
        whole[:, TYPES:] = self.types
        whole *= alive.unsqueeze(1)
        done = (last.unsqueeze(1) == self.numbered).flatten(0, 1)
        return {
            "obs": _copies_first(obs).unflatten(1, (allies, -1)),
            "mask": _copies_first(available.flatten(0, 1)).unflatten(1, (allies, -1)),
            "state": _copies_first(torch.cat((whole.flatten(0, 1).index_select(0, self.state_columns), done))),
            "alive": _copies_first(alive[:allies]),
        }

    def numbers(self, state: Tensor) -> dict[str, Tensor]:
        alive = state.split(self.rows)[2] > 0
        ours, theirs = alive[: self.allies], alive[self.allies :]
        return {
            "won": ours.any(0) & ~theirs.any(0),
            "dead_allies": (~ours).sum(0),
            "dead_enemies": (~theirs).sum(0),
        }

    def _look(self, state: Tensor) -> Look:
        allies = self.allies
        x, y, health, *_ = state.split(self.rows)
        alive = health > 0
        lives, speed = alive[:allies], self.speed[:allies]
        gap_x, gap_y = x - x[:allies].unsqueeze(1), y - y[:allies].unsqueeze(1)
        distance = (gap_x.square() + gap_y.square()).sqrt()
        north, south = y[:allies] + speed <= SIZE, y[:allies] - speed >= 0
        east, west = x[:allies] + speed <= SIZE, x[:allies] - speed >= 0
        moves = torch.stack((~lives, lives, *(room & lives for room in (north, south, east, west))), 1)
        attacks = (distance[:, allies:] <= self.range[:allies, None]) & lives.unsqueeze(1) & alive[allies:]
        return Look(alive, gap_x, gap_y, distance, torch.cat((moves, attacks), 1))


def _copies_first(rows: Tensor) -> Tensor:
    """From `[k,N]` to `[N,k]`, in memory too: two dimensions are turned faster than more of them."""
    return rows.T.contiguous()


SKIRMISHES: dict[str, type[TorchEnv]] = {
    f"skirmish/{name}": type(f"Skirmish_{name}", (Skirmish,), {"map_name": name}) for name in MAPS
}
