"""List the known environments by family, with what must be installed to use them."""

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
    """Environments of one package. `missing` describes what to install, or is empty if everything is installed."""

    title: str
    names: list[str]
    missing: str = ""


@dataclass(frozen=True)
class _FamilySpec:
    title: str
    names: Callable[[], list[str]]
    package: str = ""  # that these environments import
    extra: str = ""  # that installs the package
    needs: str = ""  # instructions if no extra installs it
    example: str = ""  # name to list if the names are unknown without the package


def _gymnasium_names(module: str) -> Callable[[], list[str]]:
    """Return a function that lists the Gymnasium ids implemented in a module."""
    return lambda: [name for name in gymnasium_ids.names() if _module_of(name).startswith(module)]


def _pettingzoo_names(prefix: str) -> Callable[[], list[str]]:
    return lambda: [name for name in pettingzoo_envs.names() if name.startswith(prefix)]


FAMILIES = (
    _FamilySpec("Gymnasium, classic control", _gymnasium_names("gymnasium.envs.classic_control")),
    _FamilySpec("Gymnasium, toy text", _gymnasium_names("gymnasium.envs.toy_text"), "pygame", "toy-text"),
    _FamilySpec("Gymnasium, Box2D", _gymnasium_names("gymnasium.envs.box2d"), "Box2D", "box2d"),
    _FamilySpec("Gymnasium, MuJoCo", _gymnasium_names("gymnasium.envs.mujoco"), "mujoco", "mujoco"),
    _FamilySpec(
        "Gymnasium-Robotics",
        _gymnasium_names("gymnasium_robotics"),
        "gymnasium_robotics",
        "robotics",
        "",
        "FetchReach-v4",
    ),
    _FamilySpec("DeepMind Control", dm_control_suite.names, "dm_control", "dmc"),
    _FamilySpec("Atari", atari.names, "ale_py", "atari", example="ALE/Pong-v5"),
    _FamilySpec("Super Mario Bros.", mario.names, "gym_super_mario_bros", "mario"),
    _FamilySpec("stable-retro, games with imported ROMs", retro_games.names, "stable_retro", "mario"),
    _FamilySpec("Procgen", procgen_envs.names, "envpool", "procgen"),
    _FamilySpec("Multi-agent particles (MPE)", _pettingzoo_names("mpe/"), "mpe2", "marl"),
    _FamilySpec("PettingZoo, board games", _pettingzoo_names("pettingzoo/"), "pettingzoo", "marl"),
    _FamilySpec("Level-based foraging", foraging.names, "lbforaging", "marl"),
    _FamilySpec(
        "StarCraft II (SMAC)",
        smac.names,
        "smac",
        needs="needs the game and pip install git+https://github.com/oxwhirl/smac",
    ),
    _FamilySpec("SMAX", smax.names, "jaxmarl", "smax"),
    _FamilySpec("Skirmish, built in", skirmish.names),
    _FamilySpec("Toy environments, built in", toy.names),
)


def families() -> Iterator[Family]:
    """Yield the families of known environments, then one family per other package that registered Gymnasium ids."""
    listed: set[str] = set()
    for spec in FAMILIES:
        names = spec.names()
        listed.update(names)
        if spec.package and find_spec(spec.package) is None:
            example = [f"{spec.example} and others"] if spec.example and not names else []
            needs = spec.needs or f"needs the extra {spec.extra!r}: {install_hint(spec.extra)}"
            yield Family(spec.title, names or example, needs)
        else:
            yield Family(spec.title, names)
    other_packages: dict[str, list[str]] = {}
    for name in gymnasium_ids.names():
        if name not in listed:
            other_packages.setdefault(_module_of(name).partition(".")[0], []).append(name)
    for package, names in sorted(other_packages.items()):
        yield Family(f"registered by {package}", names)


def _module_of(name: str) -> str:
    return gymnasium_ids.entry_module(registry[name])
