"""Contract 7: every algorithm learns a small task within seconds, with small networks and few updates."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import takes_discrete, toy_task

import zhixing as zx

# toy/match pays 1 per right answer in 10: chance 2.5, perfect 10. toy/reach costs the distance in each of 20 steps.
# Those for teams pay the same on average.
DISCRETE, CONTINUOUS = 9.0, -3.0


@pytest.mark.parametrize("actions", ["discrete", "continuous"])
def test_learns_a_toy_task(algorithm: str, actions: str, tmp_path: Path) -> None:
    task = toy_task(algorithm, actions == "discrete")
    threshold = DISCRETE if actions == "discrete" else CONTINUOUS
    if actions == "discrete" and not takes_discrete(algorithm):
        pytest.skip("continuous actions only")
    settings = {"env_steps": 30_000, "eval_every_steps": 1_000, "stop_return": threshold, "seed": 1}
    if zx.algorithms.get(algorithm).settings.scheme == "off_policy":
        settings |= {"steps_per_iteration": 4, "updates_per_step": 0.25, "batch_size": 64, "warmup_steps": 500}
        settings |= {"net__hidden_sizes": [64, 64]}
        if "actor_delay" in zx.algorithms.get(algorithm).settings.model_fields:
            settings["actor_delay"] = 1
    cfg = zx.config.load(algorithm=algorithm, env=task, tensorboard=False, **settings)
    try:  # an algorithm is refused on actions that it can't take, never on both kinds
        session = zx.Session(cfg, tmp_path / "run", quiet=True)
    except zx.UserError as refused:
        pytest.skip(str(refused))
    result = session.run()
    assert result["reached"], f"{algorithm} only reached {result['best_return']}"
