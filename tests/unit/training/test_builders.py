"""Each builder of a session can be replaced by another function."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import zhixing as zx
from zhixing.config import RunConfig
from zhixing.training import builders
from zhixing.training.session import BUILDERS

Small = Callable[..., RunConfig]


class Slow(zx.Actor):
    """An actor that counts its calls and whether it was closed."""

    calls = 0
    closed = False

    def collect(self, *args: Any, **given: Any) -> zx.Experience:
        self.calls += 1
        return super().collect(*args, **given)

    def close(self) -> None:
        self.closed = True
        super().close()


def build_slow(cfg: RunConfig, learner: zx.Learner, env: zx.envs.VectorEnv, folder: Any) -> zx.Collector:
    return Slow(learner.policy, env, learner.extra_fields, seed=cfg.seed)


def test_an_own_collector_trains_and_resumes(short_config: Small, tmp_path: Path) -> None:
    """The short run has 1,200 steps; each `collect` brings some of them."""
    session = zx.Session(
        short_config("ppo", vector__backend="serial"), tmp_path / "run", quiet=True, build_collector=build_slow
    )
    steps = session.run()["env_steps"]
    assert isinstance(session.collector, Slow)
    assert session.collector.calls == steps // (session.cfg.rollout_steps * session.cfg.num_envs)  # type: ignore[attr-defined]
    assert session.collector.closed
    again = zx.Session.resume(tmp_path / "run", quiet=True, env_steps=2 * steps, build_collector=build_slow)
    assert isinstance(again.collector, Slow)
    assert again.run()["env_steps"] == 2 * steps


@pytest.mark.parametrize("name", BUILDERS)
def test_every_builder_is_replaceable(name: str, short_config: Small, tmp_path: Path) -> None:
    default = getattr(builders, name)
    calls = []

    def counted(*args: Any, **given: Any) -> Any:
        calls.append(name)
        return default(*args, **given)

    given: dict[str, Any] = {name: counted}
    zx.Session(short_config("dqn", vector__backend="serial"), tmp_path / "run", quiet=True, **given).close()
    assert calls == [name]


def test_a_failing_builder_closes_what_was_built(short_config: Small, tmp_path: Path) -> None:
    built: list[Slow] = []

    def build_collector(*args: Any) -> zx.Collector:
        collector = build_slow(*args)
        assert isinstance(collector, Slow)
        built.append(collector)
        return collector

    def build_buffer(*args: Any, **given: Any) -> Any:
        raise zx.UserError("no buffer today")

    with pytest.raises(zx.UserError, match="no buffer today"):
        zx.Session(
            short_config("dqn", vector__backend="serial"),
            tmp_path / "run",
            quiet=True,
            build_collector=build_collector,
            build_buffer=build_buffer,
        )
    assert built[0].closed
    assert built[0].env.closed
