"""The fast console: stable-retro's NES core (FCEUmm). Its pictures leave out 8 pixels at each edge, as televisions do.

There can be only one emulator in a process, so consoles with the same cartridge take turns on it: what a change costs,
13 KB to save and to load and a picture to keep, is little beside a frame.
"""

from __future__ import annotations

import gc
import weakref
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from zhixing.envs.vector.step_buffers import Array
from zhixing.errors import UserError

# the core's order of buttons, as bits of a byte as the game's own joypad has them; the second is none
ORDER = (0x02, 0x00, 0x04, 0x08, 0x10, 0x20, 0x40, 0x80, 0x01)
MASKS = np.array([[byte & bit != 0 for bit in ORDER] for byte in range(256)], np.uint8)


class Emulator:
    """The one of this process; `holder` is the console that it plays now."""

    running: Emulator | None = None

    def __init__(self, rom: Path) -> None:
        from stable_retro.data import GameData

        core, data = _core(rom), GameData()
        core.configure_data(data)
        self.rom, self.core, self.memory = rom, core, data.memory
        self.data = data  # else its memory goes
        for address in range(2048):  # a real console's memory holds anything at first; the other core's is empty
            self.memory.assign(address, "|u1", 0)
        core.step()  # so that each START falls on the same frame of the game as in the other core
        self.blank = core.get_state()
        self.users: weakref.WeakSet[RetroConsole] = weakref.WeakSet()
        self.holder: weakref.ref[RetroConsole] | None = None

    @classmethod
    def with_rom(cls, rom: Path) -> Emulator:
        if cls.running is None or cls.running.rom != rom:
            cls.make_way()
            if cls.running is not None:
                raise one_per_process(rom.name, cls.running.rom.name)
            cls.running = cls(rom)
        return cls.running

    @classmethod
    def make_way(cls) -> None:
        """Stop it, if nobody plays any more."""
        if cls.running is not None:
            gc.collect()  # who was forgotten, not closed
            if not cls.running.users:
                cls.running = None


class RetroConsole:
    def __init__(self, rom: Path) -> None:
        self.emulator = Emulator.with_rom(rom)
        self.emulator.users.add(self)
        self.core, self.memory = self.emulator.core, self.emulator.memory
        self._me = weakref.ref(self)
        self._state = self.emulator.blank  # valid while another console is played
        self._picture: Array | None = None  # what is on the screen, where the emulator can't tell
        self._start: dict[str, Any] = {}
        self._take()
        self.shape = self.core.get_screen().shape

    def advance(self, buttons: int) -> None:
        self._take()
        self._picture = None
        self.core.set_button_mask(MASKS[buttons], 0)
        self.core.step()

    def ram(self) -> bytes:
        self._take()
        blocks = self.memory.blocks  # of 1024 bytes, by address
        return blocks[0] + blocks[0x400]

    def poke(self, address: int, value: int) -> None:
        self._take()
        self.memory.assign(address, "|u1", value)

    def picture(self) -> Array:
        if self._picture is not None:
            return self._picture.copy()
        self._take()
        return self.core.get_screen()

    def begin_here(self) -> None:
        self._take()
        self._start = {"state": self.core.get_state(), "picture": self.picture()}

    def rewind(self) -> None:
        self._put(self._start["state"], self._start["picture"])

    def state_dict(self) -> dict[str, Any]:
        self._take()
        state = np.frombuffer(self.core.get_state(), np.uint8)
        # a saved state has no picture, and the next one is drawn by the next frame only
        picture = np.frombuffer(zlib.compress(self.picture().tobytes(), 1), np.uint8)
        return {"state": state, "picture": picture}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pixels = np.frombuffer(zlib.decompress(state["picture"].tobytes()), np.uint8)
        self._put(state["state"].tobytes(), pixels.reshape(self.shape))

    def close(self) -> None:
        emulator = self.emulator
        emulator.users.discard(self)
        if emulator.holder is self._me:
            emulator.holder = None
        del self.emulator, self.core, self.memory
        if not emulator.users and Emulator.running is emulator:
            Emulator.running = None  # with the last name of it the emulator goes

    def _put(self, state: bytes, picture: Array) -> None:
        self._take()
        self.core.set_state(state)
        self._picture = picture

    def _take(self) -> None:
        """Make the emulator play this console."""
        emulator = self.emulator
        if emulator.holder is self._me:
            return
        other = emulator.holder() if emulator.holder is not None else None
        if other is not None:
            other._state, other._picture = self.core.get_state(), other.picture()
        self.core.set_state(self._state)
        emulator.holder = self._me


def _core(rom: Path) -> Any:
    import stable_retro

    try:
        return stable_retro.RetroEmulator(str(rom))
    except RuntimeError:
        gc.collect()  # perhaps one was forgotten, not closed
    try:
        return stable_retro.RetroEmulator(str(rom))
    except RuntimeError as error:
        raise one_per_process(rom.name, "another game") from error


def one_per_process(wanted: str, running: str) -> UserError:
    return UserError(
        f"{wanted} can't run beside {running}: stable-retro runs one game per process; close the other, or give each "
        f"environment its own process with vector.backend=process and vector.workers as many as num_envs"
    )
