"""The fast emulator: stable-retro's NES core (FCEUmm). Its screen omits 8 pixels at each edge, as televisions do.

A process can run only one emulator, so consoles with the same ROM share it. Switching consoles saves and loads 13 KB
and keeps one screen, which is cheap compared to a frame.
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

# the core's button order, each as its bit in the game's joypad byte; the second button doesn't exist on the NES
BUTTON_BITS = (0x02, 0x00, 0x04, 0x08, 0x10, 0x20, 0x40, 0x80, 0x01)
BUTTON_MASKS = np.array([[byte & bit != 0 for bit in BUTTON_BITS] for byte in range(256)], np.uint8)


class Emulator:
    """The emulator of this process. `active` is the console whose state it holds."""

    current: Emulator | None = None

    def __init__(self, rom: Path) -> None:
        from stable_retro.data import GameData

        core, data = _start_core(rom), GameData()
        core.configure_data(data)
        self.rom, self.core, self.memory = rom, core, data.memory
        self.data = data  # keeps its memory alive
        for address in range(2048):  # a real console powers on with arbitrary memory, nes-py with zeros
            self.memory.assign(address, "|u1", 0)
        core.step()  # aligns START with the same frame of the game as in nes-py
        self.initial_state = core.get_state()
        self.consoles: weakref.WeakSet[RetroConsole] = weakref.WeakSet()
        self.active: weakref.ref[RetroConsole] | None = None

    @classmethod
    def get(cls, rom: Path) -> Emulator:
        """Return the emulator of this ROM, and start it if necessary."""
        if cls.current is None or cls.current.rom != rom:
            cls.release_unused()
            if cls.current is not None:
                raise one_per_process_error(rom.name, cls.current.rom.name)
            cls.current = cls(rom)
        return cls.current

    @classmethod
    def release_unused(cls) -> None:
        """Stop the emulator if no console uses it."""
        if cls.current is not None:
            gc.collect()  # consoles that were dropped without `close`
            if not cls.current.consoles:
                cls.current = None


class RetroConsole:
    def __init__(self, rom: Path) -> None:
        self.emulator = Emulator.get(rom)
        self.emulator.consoles.add(self)
        self.core, self.memory = self.emulator.core, self.emulator.memory
        self._ref = weakref.ref(self)
        self._state = self.emulator.initial_state  # valid while another console is active
        self._screen: Array | None = None  # set where the emulator can't provide it: after loading a state
        self._start: dict[str, Any] = {}
        self._activate()
        self.shape = self.core.get_screen().shape

    def advance(self, buttons: int) -> None:
        self._activate()
        self._screen = None
        self.core.set_button_mask(BUTTON_MASKS[buttons], 0)
        self.core.step()

    def ram(self) -> bytes:
        self._activate()
        blocks = self.memory.blocks  # of 1,024 bytes, by address
        return blocks[0] + blocks[0x400]

    def poke(self, address: int, value: int) -> None:
        self._activate()
        self.memory.assign(address, "|u1", value)

    def screen(self) -> Array:
        if self._screen is not None:
            return self._screen.copy()
        self._activate()
        return self.core.get_screen()

    def save_start(self) -> None:
        self._activate()
        self._start = {"state": self.core.get_state(), "screen": self.screen()}

    def restore_start(self) -> None:
        self._restore(self._start["state"], self._start["screen"])

    def state_dict(self) -> dict[str, Any]:
        self._activate()
        state = np.frombuffer(self.core.get_state(), np.uint8)
        # the emulator's state doesn't include the screen, which is drawn again only at the next frame
        screen = np.frombuffer(zlib.compress(self.screen().tobytes(), 1), np.uint8)
        return {"state": state, "screen": screen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pixels = np.frombuffer(zlib.decompress(state["screen"].tobytes()), np.uint8)
        self._restore(state["state"].tobytes(), pixels.reshape(self.shape))

    def close(self) -> None:
        emulator = self.emulator
        emulator.consoles.discard(self)
        if emulator.active is self._ref:
            emulator.active = None
        del self.emulator, self.core, self.memory
        if not emulator.consoles and Emulator.current is emulator:
            Emulator.current = None  # the last reference to it, so it stops

    def _restore(self, state: bytes, screen: Array) -> None:
        self._activate()
        self.core.set_state(state)
        self._screen = screen

    def _activate(self) -> None:
        """Load this console's state into the emulator."""
        emulator = self.emulator
        if emulator.active is self._ref:
            return
        previous = emulator.active() if emulator.active is not None else None
        if previous is not None:
            previous._state, previous._screen = self.core.get_state(), previous.screen()
        self.core.set_state(self._state)
        emulator.active = self._ref


def _start_core(rom: Path) -> Any:
    import stable_retro

    try:
        return stable_retro.RetroEmulator(str(rom))
    except RuntimeError:
        gc.collect()  # another emulator may have been dropped without `close`
    try:
        return stable_retro.RetroEmulator(str(rom))
    except RuntimeError as error:
        raise one_per_process_error(rom.name, "another game") from error


def one_per_process_error(game: str, running_game: str) -> UserError:
    return UserError(
        f"{game} can't run in the same process as {running_game}: stable-retro runs one game per process. Close the "
        f"other game, or give each environment its own process with vector.backend=process and vector.workers equal to "
        f"num_envs"
    )
