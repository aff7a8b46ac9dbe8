"""Skip the title screen, death animations and cutscenes, as gym-super-mario-bros does."""

from __future__ import annotations

from typing import Protocol

from zhixing.envs.adapters.mario import rules
from zhixing.envs.adapters.mario.rules import Level
from zhixing.envs.vector.step_buffers import Array

START = 0b1000
MAX_FRAMES = 3600  # per cutscene; the cutscene of a paused game never ends


class Console(Protocol):
    """An emulated console that runs the game."""

    shape: tuple[int, int, int]  # of the screen

    def advance(self, buttons: int) -> None:
        """Run one frame with these buttons held, one bit each: right (highest), left, down, up, start, select, B, A."""

    def ram(self) -> bytes: ...

    def poke(self, address: int, value: int) -> None: ...

    def screen(self) -> Array:
        """Return a copy of the screen."""

    def save_start(self) -> None:
        """Save this moment for `restore_start`."""

    def restore_start(self) -> None: ...

    def close(self) -> None: ...


def start_level(console: Console, level: Level | None) -> None:
    """Advance past the title screen to the first second of `level`, or of the first level if None."""
    console.advance(START)
    console.advance(0)
    while rules.read_number(console.ram(), rules.TIME) == 0:
        console.advance(START)
        if level is not None:
            console.poke(rules.WORLD, level[0] - 1)
            console.poke(rules.STAGE, level[1] - 1)
            console.poke(rules.AREA, rules.area_number(level) - 1)
        console.advance(0)
        console.poke(rules.LEVEL_TIMER, 0)
    previous_time = time = rules.read_number(console.ram(), rules.TIME)
    while time >= previous_time:
        console.advance(START)
        console.advance(0)
        previous_time, time = time, rules.read_number(console.ram(), rules.TIME)


def skip_cutscenes(console: Console, ram: bytes, whole_game: bool) -> None:
    """Advance until the player controls Mario again. `ram` is the console's current memory."""
    if rules.is_dying(ram):
        console.poke(rules.STATE, rules.DEAD)
        console.advance(0)
        ram = console.ram()
    if whole_game and rules.is_world_over(ram):
        time = ram[rules.TIME]
        for _ in range(MAX_FRAMES):
            console.advance(0)
            ram = console.ram()
            if ram[rules.TIME] != time:
                break
    if 1 < ram[rules.AREA_TIMER] < 255:
        console.poke(rules.AREA_TIMER, 1)
    for _ in range(MAX_FRAMES):
        if not (rules.is_busy(ram) or rules.is_world_over(ram)):
            break
        console.poke(rules.LEVEL_TIMER, 0)
        console.advance(0)
        ram = console.ram()
