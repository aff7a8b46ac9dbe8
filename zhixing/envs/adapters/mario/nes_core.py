"""The reference emulator nes-py, as gym-super-mario-bros runs it. It is slow and its state can't be saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from zhixing.envs.vector.step_buffers import Array


class NesConsole:
    def __init__(self, rom: Path) -> None:
        from nes_py import nes_env

        patch_rom_header(nes_env)
        self.env = nes_env.NESEnv(str(rom))
        self.env.reset()
        self.shape = self.env.screen.shape

    def advance(self, buttons: int) -> None:
        self.env._frame_advance(buttons)

    def ram(self) -> bytes:
        return self.env.ram.tobytes()

    def poke(self, address: int, value: int) -> None:
        self.env.ram[address] = value

    def screen(self) -> Array:
        return np.ascontiguousarray(self.env.screen)

    def save_start(self) -> None:
        self.env._backup()

    def restore_start(self) -> None:
        self.env._restore()

    def close(self) -> None:
        self.env.close()


def patch_rom_header(nes_env: Any) -> None:
    """Make nes-py read ROM headers as integers: since NumPy 2 its arithmetic on header bytes overflows."""
    if not issubclass(nes_env.ROM, _IntHeader):
        nes_env.ROM = type("ROM", (_IntHeader, nes_env.ROM), {})


class _IntHeader:
    raw_data: Array

    @property
    def header(self) -> Array:
        return self.raw_data[:16].astype(np.int64)
