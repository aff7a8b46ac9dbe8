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
    """A registered algorithm."""

    name: str
    summary: str
    learner: Callable[..., Learner]  # (cfg, spaces, device, net) -> Learner: a class, or a function that makes one
    settings: type[RunConfig]
    multi_agent: bool | None = False  # True: only for several agents; False: only for one; None: for both

    def make(self, cfg: RunConfig, *args: Any, **parts: Any) -> Learner:
        """Return a new learner. With `compile=true` its updates are compiled."""
        return compile_updates(self.learner(cfg, *args, **parts), cfg)


def compile_updates(learner: AnyLearner, cfg: RunConfig) -> AnyLearner:
    """Make a learner run its updates as compiled graphs if `compile=true`."""
    if cfg.compile:
        from zhixing.compile import CompiledUpdates  # slow to import, and most runs don't need it

        learner.executor = CompiledUpdates(learner, cfg)
    return learner


_registered: dict[str, Algorithm] = {}


def register(
    name: str, summary: str, settings: type[RunConfig] | None = None, **parts: Any
) -> Callable[[Factory], Factory]:
    """Return a decorator that registers a learner class, or a function that makes a learner, under a name.

    Several decorators register variants, with other settings or other `parts`: keyword arguments of the learner.
    """

    def add(factory: Factory) -> Factory:
        config = settings or factory.settings  # type: ignore[attr-defined]  # of a class; functions pass `settings`
        multi_agent = getattr(factory, "multi_agent", False)
        _registered[name] = Algorithm(name, summary, partial(factory, **parts), config, multi_agent)
        return factory

    return add


def names() -> list[str]:
    """Return the names of all algorithms."""
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        importlib.import_module(f"{__name__}.{module.name}")
    return sorted(_registered)


def get(name: str) -> Algorithm:
    """Return an algorithm by its name, in any spelling (`PPO`, `Double-DQN`), or `your.module:YourLearner`."""
    if ":" in name:
        return _user_algorithm(name)
    if name not in _registered:
        matches = [known for known in names() if _normalize(known) == _normalize(name)]
        if len(matches) != 1:
            raise unknown("algorithm", name.strip().lower(), names(), "(see `zhixing list algorithms`)")
        (name,) = matches
    return _registered[name]


def _normalize(name: str) -> str:
    """Return only the letters and digits of a name, in lower case: `doubledqn` for `Double-DQN` and `double_dqn`."""
    return "".join(character for character in name.lower() if character.isalnum())


def _user_algorithm(name: str) -> Algorithm:
    from zhixing.core.learner import Learner

    learner = import_object(name)
    if not (isinstance(learner, type) and issubclass(learner, Learner) and hasattr(learner, "settings")):
        raise UserError(f"algorithm {name!r} must be a zhixing.Learner class with the attribute `settings`")
    summary = (learner.__doc__ or "").strip().split("\n")[0]
    return Algorithm(name, summary, learner, learner.settings, learner.multi_agent)
