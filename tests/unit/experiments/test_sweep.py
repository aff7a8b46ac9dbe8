"""Tests of sweeps: arguments, the plan, the table, and complete sweeps with a failure and a kill."""

from __future__ import annotations

import csv
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import Command, differing_tensors

import zhixing as zx
from zhixing.errors import UserError
from zhixing.experiments.jobs import Job
from zhixing.experiments.sweep import (
    Variant,
    parse_seeds,
    parse_values,
    plan,
    rank,
    read_grid,
    split_values,
    table_rows,
)
from zhixing.utils.tables import format_cell

PPO = [{"algorithm": "ppo", "env": "toy/match"}]


# --- arguments ---


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("1e-3", ["1e-3"]),
        ("1e-3,3e-4", ["1e-3", "3e-4"]),
        ("[64,64]", ["[64,64]"]),
        ("[64,64],[256,256]", ["[64,64]", "[256,256]"]),
        ("{a: 1, b: [2,3]},x", ["{a: 1, b: [2,3]}", "x"]),
        ("'a,b',c", ["'a,b'", "c"]),
        ('"it\'s, so",2', ['"it\'s, so"', "2"]),
        ("", [""]),
    ],
)
def test_commas_split_values_outside_brackets_and_quotes(text: str, parts: list[str]) -> None:
    assert split_values(text) == parts


def test_last_argument_for_a_setting_wins() -> None:
    values = parse_values(["lr=1,2", "gamma=0.9", "net.hidden_sizes=[8],[8,8]", "lr=3e-4,none"])
    assert values == {"gamma": [0.9], "net.hidden_sizes": [[8], [8, 8]], "lr": [3e-4, "none"]}


@pytest.mark.parametrize("argument", ["lr", "=3", "lr=1,,2", "lr=1,", "--lr=1"])
def test_invalid_arguments_are_rejected(argument: str) -> None:
    with pytest.raises(UserError):
        parse_values([argument])


def test_parse_seeds() -> None:
    assert parse_seeds("0-4") == [0, 1, 2, 3, 4]
    assert parse_seeds("7-7") == [7]
    assert parse_seeds("0") == [0]
    assert parse_seeds("0-1, 5,9-9") == [0, 1, 5, 9]
    for invalid in ("", "4-0", "a", "-1", "0..4", "1-2,2", "5"):
        with pytest.raises(UserError, match="--seeds"):
            parse_seeds(invalid)


def test_read_grid(tmp_path: Path) -> None:
    file = tmp_path / "grid.yaml"
    file.write_text("lr: [1e-3, 3e-4]\nnum_envs: [2]\nnet: {hidden_sizes: [[8], [8, 8]]}\n")
    assert read_grid(file) == {"lr": [1e-3, 3e-4], "num_envs": [2], "net.hidden_sizes": [[8], [8, 8]]}
    for invalid in ("lr: 1e-3", "lr: []"):
        file.write_text(invalid)
        with pytest.raises(UserError, match="must be a list of values"):
            read_grid(file)


# --- the plan ---


def test_plan_combines_all_values_with_all_seeds_in_named_folders(tmp_path: Path) -> None:
    values = {"lr": [1e-3, 3e-4], "net.hidden_sizes": [[8, 8]], "gamma": [0.9, 1.0]}
    variants = plan(PPO, values, [0, 3], tmp_path)
    assert [variant.label for variant in variants] == [
        "lr=0.001 gamma=0.9",
        "lr=0.001 gamma=1.0",
        "lr=0.0003 gamma=0.9",
        "lr=0.0003 gamma=1.0",
    ]
    assert [job.name for job in variants[0].jobs] == ["lr=0.001_gamma=0.9_seed=0", "lr=0.001_gamma=0.9_seed=3"]
    settings = variants[3].jobs[1].settings
    assert (settings["lr"], settings["gamma"], settings["seed"], settings["num_threads"]) == (3e-4, 1.0, 3, 1)
    assert settings["net"]["hidden_sizes"] == [8, 8]
    assert list(tmp_path.iterdir()) == []


def test_folder_names_are_safe_and_short(tmp_path: Path) -> None:
    values = {"env.name": ["toy/match", "toy/recall"], "net.hidden_sizes": [[8, 8], [16]]}
    names = [variant.jobs[0].name for variant in plan([{"algorithm": "ppo"}], values, [0], tmp_path)]
    assert names[0] == "env.name=toy-match_net.hidden_sizes=8-8_seed=0"
    sizes = [[8] * 90, [8] * 91]
    names = [variant.jobs[0].name for variant in plan(PPO, {"net.hidden_sizes": sizes}, [0], tmp_path)]
    assert len(set(names)) == 2
    assert max(map(len, names)) < 220


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lr": [1e-3, -1.0]}, "lr=-1.0: lr=-1.0: should be greater than 0"),
        ({"lrr": [1, 2]}, "did you mean 'lr'"),
        ({"seed": [1, 2]}, "--seeds"),
        ({"gamma": [0.9, 0.9]}, "gamma has the value 0.9 twice"),
        ({"shared_network": [False, True], "critic_lr": [1e-3]}, "shared_network=true has one optimizer"),
        ({"env.max": [1, 2]}, "env.max=1: "),  # found only by making the env
        ({"vector.workers": [1, 9], "num_envs": [4]}, "vector.workers=9: workers is 9"),
        ({"env.name": ["toy/match", "toy/reach"], "algorithm": ["dqn"]}, "env.name=toy/reach: dqn needs Discrete"),
    ],
)
def test_invalid_combinations_are_rejected_before_the_first_run(values: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        plan(PPO, values, [0], tmp_path)
    assert message in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_step_timeout_is_kept_for_the_run(tmp_path: Path) -> None:
    settings = {"num_envs": 2, "vector": {"backend": "process", "step_timeout": 5.0}}
    (variant,) = plan([*PPO, settings], {"lr": [1e-3]}, [0], tmp_path)
    assert variant.jobs[0].settings["vector"]["step_timeout"] == 5.0


# --- the table ---


def make_variant(
    label: str, returns: list[float | None], steps: list[int | None], stop: float | None = None
) -> Variant:
    jobs = [Job(f"{label}_seed={i}", Path(label), {"stop_return": stop}) for i in range(len(returns))]
    results = {
        job.name: {"final_return": final_return, "env_steps_to_stop": n, "seconds": 2.0}
        for job, final_return, n in zip(jobs, returns, steps, strict=True)
    }
    return Variant(label, {"lr": label}, jobs, results)


def test_mean_and_interval_of_the_final_return() -> None:
    # mean 20, standard deviation 10, t(2) = 4.3027: 20 ± 4.3027 * 10 / √3 = 20 ± 24.842
    (row,) = table_rows([make_variant("a", [10.0, 20.0, 30.0], [None] * 3)])
    assert list(row) == ["lr", "seeds", "return_mean", "return_low", "return_high", "seconds"]
    assert (row["seeds"], row["return_mean"], row["seconds"]) == (3, 20.0, 2.0)
    assert row["return_low"] == pytest.approx(-4.842, abs=1e-3)
    assert row["return_high"] == pytest.approx(44.842, abs=1e-3)
    (single,) = table_rows([make_variant("a", [10.0], [None])])
    assert single["return_mean"] == 10.0
    assert math.isnan(single["return_low"])
    (empty,) = table_rows([make_variant("a", [], [])])
    assert math.isnan(empty["return_mean"])
    assert format_cell(empty["seconds"]) == ""


def test_best_mean_comes_first_and_variants_without_results_last() -> None:
    variants = [
        make_variant("none", [], []),
        make_variant("low", [1.0, 3.0], [None] * 2),
        make_variant("high", [2.0, 3.0], [None] * 2),
    ]
    assert [variant.label for variant in rank(variants)] == ["high", "low", "none"]


def test_with_stop_return_the_fastest_variant_comes_first() -> None:
    variants = [
        make_variant("late", [480.0, 480.0], [3000, 5000], 475.0),
        make_variant("once", [500.0, 100.0], [100, None], 475.0),
        make_variant("soon", [476.0, 476.0], [1000, 2000], 475.0),
    ]
    ordered = rank(variants)
    assert [variant.label for variant in ordered] == ["soon", "late", "once"]
    rows = table_rows(ordered)
    assert [(row["reached"], row["env_steps_to_stop"]) for row in rows] == [(2, 1500.0), (2, 4000.0), (1, 100.0)]


# --- complete sweeps ---

SHORT = ["env_steps=256", "eval_every=128", "rollout_steps=64", "minibatch_size=64", "num_envs=2"]
SHORT += ["eval_episodes=2", "tensorboard=false", "vector.backend=serial", "net.hidden_sizes=[8]"]


def test_failed_run_is_reported_and_the_others_continue(run_cli: Command) -> None:
    """A second call keeps finished runs. Other settings in the same folders are rejected."""
    arguments = ["sweep", "ppo", "env=dummy_envs:RaisingEnv,toy/match", "--seeds", "1-1", "--out", "all", *SHORT]
    code, out, err = run_cli(*arguments, "--workers", "2")
    assert code == 1
    assert "done     env=toy-match_seed=1  return" in err
    assert "failed: env=dummy_envs-RaisingEnv_seed=1: ZeroDivisionError: the third step is broken" in err
    assert "dummy_envs.py" in Path("all/output/env=dummy_envs-RaisingEnv_seed=1.txt").read_text()
    rows = list(csv.DictReader(Path("all/sweep.csv").read_text().splitlines()))
    result = json.loads(Path("all/env=toy-match_seed=1/result.json").read_text())
    assert [(row["env"], row["seeds"]) for row in rows] == [("toy/match", "1"), ("dummy_envs:RaisingEnv", "0")]
    assert float(rows[0]["return_mean"]) == pytest.approx(result["final_return"])
    assert rows[1]["return_mean"] == ""
    assert "toy/match" in out
    assert Path("all/sweep.png").stat().st_size > 10_000
    written = Path("all/env=toy-match_seed=1/result.json").stat().st_mtime_ns
    failed = Path("all/env=dummy_envs-RaisingEnv_seed=1/result.json")
    assert not failed.exists()
    failed.write_text(json.dumps({**result, "final_return": -1.0}))  # as if it had finished
    code, out, err = run_cli(*arguments)
    assert code == 0, err
    assert "2 runs in all, 2 already done; " in err
    assert Path("all/env=toy-match_seed=1/result.json").stat().st_mtime_ns == written
    assert Path("all/sweep.csv").read_text().splitlines()[2].startswith("dummy_envs:RaisingEnv,1,-1,")
    code, _, err = run_cli(*arguments, "lr=0.5")
    assert code == 2
    assert "holds a run with lr=" in err
    assert "not 0.5; choose another --out" in err


def test_killed_sweep_resumes_and_ends_identically(run_cli: Command, tmp_path: Path) -> None:
    arguments = ["sweep", "ppo", "--env", "dummy_envs:SlowEnv", "--seeds", "0", "--out", "all"]
    arguments += ["env_steps=1280", "checkpoint_every=128", "eval_every=0", *SHORT[2:]]
    process = subprocess.Popen(
        [sys.executable, "-m", "zhixing", *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stderr=subprocess.PIPE,
    )
    saved = tmp_path / "all" / "seed=0" / "checkpoints"
    deadline = time.monotonic() + 120
    while not list(saved.glob("0*.safetensors")) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (tmp_path / "all" / "seed=0" / "result.json").exists()
    code, _, err = run_cli(*arguments)
    assert code == 0, err
    assert "done     seed=0" in err
    variants = plan([{"algorithm": "ppo", "env": "dummy_envs:SlowEnv"}], parse_values(arguments[8:]), [0], tmp_path)
    zx.Session(zx.config.build([variants[0].jobs[0].settings], {}), "uninterrupted", quiet=True).run()
    assert differing_tensors("all/seed=0", "uninterrupted") == []
