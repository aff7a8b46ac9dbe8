"""The registry of algorithms. A file in this folder adds an algorithm to it by calling `register`."""

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

    AnyLearner = TypeVar("AnyLearner", bound=Learner)
    Factory = TypeVar("Factory", bound=Callable[..., Learner])


class Algorithm(NamedTuple):
    name: str
    summary: str
    learner: Callable[..., Learner]  # (cfg, spaces, device, net) -> Learner: a class, or a function that makes one
    settings: type[RunConfig]
    multi_agent: bool | None = False  # True: only for several agents; False: only for one; None: for both

    def make(self, cfg: RunConfig, *args: Any, **parts: Any) -> Learner:
        """Return a new learner. With compile=true it compiles its updates."""
        return compile_updates(self.learner(cfg, *args, **parts), cfg)


def compile_updates(learner: AnyLearner, cfg: RunConfig) -> AnyLearner:
    """Let a learner run its updates as compiled graphs if compile=true."""
    if cfg.compile:
        from zhixing.compile import CompiledUpdates  # slow to import, and most runs don't need it

        learner.executor = CompiledUpdates(learner, cfg)
    return learner


_registered: dict[str, Algorithm] = {}


def register(
    name: str, summary: str, settings: type[RunConfig] | None = None, **parts: Any
) -> Callable[[Factory], Factory]:
    """Register a learner class, or a function that makes a learner, under a name.

    A variant is one more decorator, with other settings or with `parts`: keyword arguments of the learner.
    """

    def add(factory: Factory) -> Factory:
        config = settings or factory.settings  # type: ignore[attr-defined]  # of a class; functions pass `settings`
        multi_agent = getattr(factory, "multi_agent", False)
        _registered[name] = Algorithm(name, summary, partial(factory, **parts), config, multi_agent)
        return factory

    return add


def names() -> list[str]:
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        importlib.import_module(f"{__name__}.{module.name}")
    return sorted(_registered)


def get(name: str) -> Algorithm:
    """Return an algorithm by its name, in any spelling (`PPO`, `Double-DQN`), or `your.module:YourLearner`."""
    if ":" in name:
        return _user_algorithm(name)
    if name not in _registered:
        same = [known for known in names() if _bare(known) == _bare(name)]
        if len(same) != 1:
            raise unknown("algorithm", name.strip().lower(), names(), "(see `zhixing list algorithms`)")
        (name,) = same
    return _registered[name]


def _bare(name: str) -> str:
    """Return a name without case, spaces and signs: `Double-DQN` and `double_dqn` are `doubledqn`."""
    return "".join(letter for letter in name.lower() if letter.isalnum())


def _user_algorithm(name: str) -> Algorithm:
    from zhixing.core.learner import Learner

    learner = import_object(name)
    if not (isinstance(learner, type) and issubclass(learner, Learner) and hasattr(learner, "settings")):
        raise UserError(f"algorithm {name!r} must be a zhixing.Learner with `settings`")
    summary = (learner.__doc__ or "").strip().split("\n")[0]
    return Algorithm(name, summary, learner, learner.settings, learner.multi_agent)
