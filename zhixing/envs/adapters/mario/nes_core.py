"""The reference console: nes-py's emulator, as gym-super-mario-bros runs it. Slow; its state can't be saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from zhixing.envs.vector.step_buffers import Array


class NesConsole:
    def __init__(self, rom: Path) -> None:
        from nes_py import nes_env

        _count_in_ints(nes_env)
        self.env = nes_env.NESEnv(str(rom))
        self.env.reset()
        self.shape = self.env.screen.shape

    def advance(self, buttons: int) -> None:
        self.env._frame_advance(buttons)

    def ram(self) -> bytes:
        return self.env.ram.tobytes()

    def poke(self, address: int, value: int) -> None:
        self.env.ram[address] = value

    def picture(self) -> Array:
        return np.ascontiguousarray(self.env.screen)

    def begin_here(self) -> None:
        self.env._backup()

    def rewind(self) -> None:
        self.env._restore()

    def close(self) -> None:
        self.env.close()


def _count_in_ints(nes_env: Any) -> None:
    """nes-py multiplies bytes of a file's header: from NumPy 2 on they overflow."""
    if issubclass(nes_env.ROM, _Sizes):
        return
    nes_env.ROM = type("ROM", (_Sizes, nes_env.ROM), {})


class _Sizes:
    raw_data: Array

    @property
    def header(self) -> Array:
        return self.raw_data[:16].astype(np.int64)
