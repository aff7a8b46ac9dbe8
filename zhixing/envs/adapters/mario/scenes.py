"""Where nobody plays: title, deaths and scenes between levels are run through, as gym-super-mario-bros does it."""

from __future__ import annotations

from typing import Protocol

from zhixing.envs.adapters.mario import rules
from zhixing.envs.adapters.mario.rules import Level
from zhixing.envs.vector.step_buffers import Array

START = 0b1000
LONGEST_SCENE = 3600  # frames; a paused game would never end one


class Console(Protocol):
    """A console with the game's cartridge in it."""

    shape: tuple[int, int, int]  # of its pictures

    def advance(self, buttons: int) -> None:
        """One frame with these buttons held, a bit each: right (the highest), left, down, up, start, select, B, A."""

    def ram(self) -> bytes: ...

    def poke(self, address: int, value: int) -> None: ...

    def picture(self) -> Array:
        """A copy of the screen."""

    def begin_here(self) -> None:
        """Let `rewind` return to this moment."""

    def rewind(self) -> None: ...

    def close(self) -> None: ...


def to_the_start(console: Console, level: Level | None) -> None:
    """Past the title to the first second of the level, or of the first one."""
    console.advance(START)
    console.advance(0)
    while rules.number(console.ram(), rules.TIME) == 0:
        console.advance(START)
        if level is not None:
            console.poke(rules.WORLD, level[0] - 1)
            console.poke(rules.STAGE, level[1] - 1)
            console.poke(rules.AREA, rules.area(level) - 1)
        console.advance(0)
        console.poke(rules.LEVEL_TIMER, 0)
    last = time = rules.number(console.ram(), rules.TIME)
    while time >= last:
        console.advance(START)
        console.advance(0)
        last, time = time, rules.number(console.ram(), rules.TIME)


def skip(console: Console, ram: bytes, whole_game: bool) -> None:
    """Run through what takes the game out of the player's hands; `ram` is what the console has now."""
    if rules.dying(ram):
        console.poke(rules.STATE, rules.DEAD)
        console.advance(0)
        ram = console.ram()
    if whole_game and rules.world_over(ram):
        time = ram[rules.TIME]
        for _ in range(LONGEST_SCENE):
            console.advance(0)
            ram = console.ram()
            if ram[rules.TIME] != time:
                break
    if 1 < ram[rules.AREA_TIMER] < 255:
        console.poke(rules.AREA_TIMER, 1)
    for _ in range(LONGEST_SCENE):
        if not (rules.busy(ram) or rules.world_over(ram)):
            break
        console.poke(rules.LEVEL_TIMER, 0)
        console.advance(0)
        ram = console.ram()
