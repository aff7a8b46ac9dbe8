"""Each builder of a session can be replaced."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import zhixing as zx
from zhixing.config import RunConfig
from zhixing.training import builders
from zhixing.training.session import BUILDERS

ShortConfig = Callable[..., RunConfig]


class CountingActor(zx.Actor):
    """Counts calls of `collect` and records whether it was closed."""

    calls = 0
    closed = False

    def collect(self, *args: Any, **kwargs: Any) -> zx.Experience:
        self.calls += 1
        return super().collect(*args, **kwargs)

    def close(self) -> None:
        self.closed = True
        super().close()


def build_counting_actor(cfg: RunConfig, learner: zx.Learner, env: zx.envs.VectorEnv, folder: Any) -> zx.Collector:
    return CountingActor(learner.policy, env, learner.extra_fields, seed=cfg.seed)


def test_custom_collector_trains_and_resumes(short_config: ShortConfig, tmp_path: Path) -> None:
    session = zx.Session(
        short_config("ppo", vector__backend="serial"),
        tmp_path / "run",
        quiet=True,
        build_collector=build_counting_actor,
    )
    steps = session.run()["env_steps"]
    assert isinstance(session.collector, CountingActor)
    assert session.collector.calls == steps // (session.cfg.rollout_steps * session.cfg.num_envs)  # type: ignore[attr-defined]
    assert session.collector.closed
    resumed = zx.Session.resume(tmp_path / "run", quiet=True, env_steps=2 * steps, build_collector=build_counting_actor)
    assert isinstance(resumed.collector, CountingActor)
    assert resumed.run()["env_steps"] == 2 * steps


@pytest.mark.parametrize("name", BUILDERS)
def test_every_builder_is_replaceable(name: str, short_config: ShortConfig, tmp_path: Path) -> None:
    default = getattr(builders, name)
    calls = []

    def builder(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return default(*args, **kwargs)

    replaced: dict[str, Any] = {name: builder}
    zx.Session(short_config("dqn", vector__backend="serial"), tmp_path / "run", quiet=True, **replaced).close()
    assert calls == [name]


def test_failing_builder_closes_the_parts_built_before(short_config: ShortConfig, tmp_path: Path) -> None:
    built: list[CountingActor] = []

    def build_collector(*args: Any) -> zx.Collector:
        collector = build_counting_actor(*args)
        assert isinstance(collector, CountingActor)
        built.append(collector)
        return collector

    def build_buffer(*args: Any, **kwargs: Any) -> Any:
        raise zx.UserError("invalid buffer")

    with pytest.raises(zx.UserError, match="invalid buffer"):
        zx.Session(
            short_config("dqn", vector__backend="serial"),
            tmp_path / "run",
            quiet=True,
            build_collector=build_collector,
            build_buffer=build_buffer,
        )
    assert built[0].closed
    assert built[0].env.closed
