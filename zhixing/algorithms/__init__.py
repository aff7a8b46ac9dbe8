"""The register of algorithms. An algorithm joins by standing in this folder, in a file that calls `register`."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from zhixing.errors import UserError, unknown
from zhixing.utils.importing import import_object

if TYPE_CHECKING:
    from zhixing.config import RunConfig
    from zhixing.core.learner import Learner

    L = TypeVar("L", bound=type[Learner])
    Made = TypeVar("Made", bound=Learner)


class Algorithm(NamedTuple):
    name: str
    summary: str
    learner: Callable[..., Learner]  # (cfg, spaces, device, net): a class, or one with some parts exchanged
    settings: type[RunConfig]
    many_agents: bool | None = False  # for tasks of several agents, and only for these; None: for any

    def make(self, cfg: RunConfig, *args: Any, **parts: Any) -> Learner:
        """Return a new learner. With compile=true it compiles its updates."""
        return with_graphs(self.learner(cfg, *args, **parts), cfg)


def with_graphs(learner: Made, cfg: RunConfig) -> Made:
    """Attach compiled updates to a learner if compile=true."""
    if cfg.compile:
        from zhixing.compile import Graphs  # slow to import, and most runs don't need it

        learner.graphs = Graphs(learner, cfg)
    return learner


_registered: dict[str, Algorithm] = {}


def register(name: str, summary: str, settings: type[RunConfig] | None = None, **parts: Any) -> Callable[[L], L]:
    """Register a learner under a name. A variant is one more line above its class: other settings, or other parts."""

    def add(learner: L) -> L:
        made = partial(learner, **parts)
        _registered[name] = Algorithm(name, summary, made, settings or learner.settings, learner.many_agents)
        return learner

    return add


def names() -> list[str]:
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        importlib.import_module(f"{__name__}.{module.name}")
    return sorted(_registered)


def get(name: str) -> Algorithm:
    """Return an algorithm by its name, in any spelling (`PPO`, `Double-DQN`), or `your.module:YourLearner`."""
    if ":" in name:
        return _own(name)
    if name not in _registered:
        same = [each for each in names() if _bare(each) == _bare(name)]
        if len(same) != 1:
            raise unknown("algorithm", name.strip().lower(), names(), "(see `zhixing list algorithms`)")
        (name,) = same
    return _registered[name]


def _bare(name: str) -> str:
    """Return a name without case, spaces and signs: `Double-DQN` and `double_dqn` are `doubledqn`."""
    return "".join(letter for letter in name.lower() if letter.isalnum())


def _own(name: str) -> Algorithm:
    from zhixing.core.learner import Learner

    learner = import_object(name)
    if not (isinstance(learner, type) and issubclass(learner, Learner) and hasattr(learner, "settings")):
        raise UserError(f"algorithm {name!r} must be a zhixing.Learner with `settings`")
    summary = (learner.__doc__ or "").strip().split("\n")[0]
    return Algorithm(name, summary, learner, learner.settings, learner.many_agents)
