"""The list of known environments by family: what is installed, and which extra the rest needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec

from gymnasium.envs.registration import registry

from zhixing.envs import toy
from zhixing.envs.adapters import (
    atari,
    dm_control_suite,
    foraging,
    gymnasium_ids,
    mario,
    pettingzoo_envs,
    procgen_envs,
    retro_games,
    skirmish,
    smac,
    smax,
)
from zhixing.utils.extras import install_hint


@dataclass(frozen=True)
class Family:
    """Environments that come from one place. `missing` says what to install; it is empty where they are installed."""

    title: str
    names: list[str]
    missing: str = ""


@dataclass(frozen=True)
class _Kind:
    title: str
    names: Callable[[], list[str]]
    package: str = ""  # that must be there
    extra: str = ""  # which brings it
    needs: str = ""  # where no extra does
    example: str = ""  # where the package itself knows the names


def _of_gymnasium(module: str) -> Callable[[], list[str]]:
    """Those Gymnasium ids whose code is in a module."""
    return lambda: [name for name in gymnasium_ids.names() if _module_of(name).startswith(module)]


def _from_pettingzoo(prefix: str) -> Callable[[], list[str]]:
    return lambda: [name for name in pettingzoo_envs.names() if name.startswith(prefix)]


KINDS = (
    _Kind("Gymnasium, classic control", _of_gymnasium("gymnasium.envs.classic_control")),
    _Kind("Gymnasium, toy text", _of_gymnasium("gymnasium.envs.toy_text"), "pygame", "toy-text"),
    _Kind("Gymnasium, Box2D", _of_gymnasium("gymnasium.envs.box2d"), "Box2D", "box2d"),
    _Kind("Gymnasium, MuJoCo", _of_gymnasium("gymnasium.envs.mujoco"), "mujoco", "mujoco"),
    _Kind(
        "Gymnasium-Robotics", _of_gymnasium("gymnasium_robotics"), "gymnasium_robotics", "robotics", "", "FetchReach-v4"
    ),
    _Kind("DeepMind Control", dm_control_suite.names, "dm_control", "dmc"),
    _Kind("Atari", atari.names, "ale_py", "atari", "", "ALE/Pong-v5"),
    _Kind("Super Mario Bros.", mario.names, "gym_super_mario_bros", "mario"),
    _Kind("stable-retro, games whose ROMs are there", retro_games.names, "stable_retro", "mario"),
    _Kind("Procgen", procgen_envs.names, "envpool", "procgen"),
    _Kind("Multi-agent particles (MPE)", _from_pettingzoo("mpe/"), "mpe2", "marl"),
    _Kind("PettingZoo, board games", _from_pettingzoo("pettingzoo/"), "pettingzoo", "marl"),
    _Kind("Level-based foraging", foraging.names, "lbforaging", "marl"),
    _Kind(
        "StarCraft II (SMAC)",
        smac.names,
        "smac",
        needs="needs the game and pip install git+https://github.com/oxwhirl/smac",
    ),
    _Kind("SMAX", smax.names, "jaxmarl", "smax"),
    _Kind("Skirmish, built in", skirmish.names),
    _Kind("Toy tasks, built in", toy.names),
)


def families() -> Iterator[Family]:
    """Yield the families of known environments, and those that imported packages have registered with Gymnasium."""
    listed: set[str] = set()
    for kind in KINDS:
        names = kind.names()
        listed.update(names)
        if kind.package and find_spec(kind.package) is None:
            example = [f"{kind.example} and others"] if kind.example and not names else []
            needs = kind.needs or f"needs the extra {kind.extra!r}: {install_hint(kind.extra)}"
            yield Family(kind.title, names or example, needs)
        else:
            yield Family(kind.title, names)
    others: dict[str, list[str]] = {}
    for name in gymnasium_ids.names():
        if name not in listed:
            others.setdefault(_module_of(name).partition(".")[0], []).append(name)
    for package, names in sorted(others.items()):
        yield Family(f"registered by {package}", names)


def _module_of(name: str) -> str:
    return gymnasium_ids.entry_module(registry[name])
