"""Sweeps: what words mean, which runs there are, the table, and a whole one with a failure and a kill."""

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
from zhixing.experiments.sweep import Setting, parse_seeds, parse_values, plan, ranked, read_grid, split_values, table
from zhixing.utils.tables import cell

PPO = [{"algorithm": "ppo", "env": "toy/match"}]


# --- words ---


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
def test_commas_part_values_outside_of_brackets_and_quotes(text: str, parts: list[str]) -> None:
    assert split_values(text) == parts


def test_words_become_values_and_the_last_wins() -> None:
    values = parse_values(["lr=1,2", "gamma=0.9", "net.hidden_sizes=[8],[8,8]", "lr=3e-4,none"])
    assert values == {"gamma": [0.9], "net.hidden_sizes": [[8], [8, 8]], "lr": [3e-4, "none"]}


@pytest.mark.parametrize("word", ["lr", "=3", "lr=1,,2", "lr=1,", "--lr=1"])
def test_wrong_words_are_told(word: str) -> None:
    with pytest.raises(UserError):
        parse_values([word])


def test_seeds() -> None:
    assert parse_seeds("0-4") == [0, 1, 2, 3, 4]
    assert parse_seeds("7-7") == [7]
    assert parse_seeds("0") == [0]
    assert parse_seeds("0-1, 5,9-9") == [0, 1, 5, 9]
    for wrong in ("", "4-0", "a", "-1", "0..4", "1-2,2", "5"):
        with pytest.raises(UserError, match="--seeds"):
            parse_seeds(wrong)


def test_a_file_of_lists(tmp_path: Path) -> None:
    file = tmp_path / "grid.yaml"
    file.write_text("lr: [1e-3, 3e-4]\nnum_envs: [2]\nnet: {hidden_sizes: [[8], [8, 8]]}\n")
    assert read_grid(file) == {"lr": [1e-3, 3e-4], "num_envs": [2], "net.hidden_sizes": [[8], [8, 8]]}
    for wrong in ("lr: 1e-3", "lr: []"):
        file.write_text(wrong)
        with pytest.raises(UserError, match="must be a list of values"):
            read_grid(file)


# --- the plan ---


def test_every_combination_with_every_seed_in_folders_with_telling_names(tmp_path: Path) -> None:
    values = {"lr": [1e-3, 3e-4], "net.hidden_sizes": [[8, 8]], "gamma": [0.9, 1.0]}
    settings = plan(PPO, values, [0, 3], tmp_path)
    assert [setting.label for setting in settings] == [
        "lr=0.001 gamma=0.9",
        "lr=0.001 gamma=1.0",
        "lr=0.0003 gamma=0.9",
        "lr=0.0003 gamma=1.0",
    ]
    assert [job.name for job in settings[0].jobs] == ["lr=0.001_gamma=0.9_seed=0", "lr=0.001_gamma=0.9_seed=3"]
    asked = settings[3].jobs[1].settings
    assert (asked["lr"], asked["gamma"], asked["seed"], asked["num_threads"]) == (3e-4, 1.0, 3, 1)
    assert asked["net"]["hidden_sizes"] == [8, 8]
    assert list(tmp_path.iterdir()) == []


def test_names_of_folders_are_safe_and_short(tmp_path: Path) -> None:
    task = {"env.name": ["toy/match", "toy/recall"], "net.hidden_sizes": [[8, 8], [16]]}
    names = [setting.jobs[0].name for setting in plan([{"algorithm": "ppo"}], task, [0], tmp_path)]
    assert names[0] == "env.name=toy-match_net.hidden_sizes=8-8_seed=0"
    sizes = [[8] * 90, [8] * 91]
    names = [setting.jobs[0].name for setting in plan(PPO, {"net.hidden_sizes": sizes}, [0], tmp_path)]
    assert len(set(names)) == 2
    assert max(map(len, names)) < 220


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lr": [1e-3, -1.0]}, "lr=-1.0: lr=-1.0: should be greater than 0"),
        ({"lrr": [1, 2]}, "did you mean 'lr'"),
        ({"seed": [1, 2]}, "--seeds"),
        ({"gamma": [0.9, 0.9]}, "gamma is to be 0.9 twice"),
        ({"shared_network": [False, True], "critic_lr": [1e-3]}, "shared_network=true allows no critic_lr"),
        ({"env.max": [1, 2]}, "env.max=1: "),  # only making the task shows it
        ({"vector.workers": [1, 9], "num_envs": [4]}, "vector.workers=9: the number of workers is 9"),
        ({"env.name": ["toy/match", "toy/reach"], "algorithm": ["dqn"]}, "env.name=toy/reach: dqn needs Discrete"),
    ],
)
def test_everything_wrong_is_told_before_the_first_run(values: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as told:
        plan(PPO, values, [0], tmp_path)
    assert message in str(told.value)
    assert list(tmp_path.iterdir()) == []


def test_a_limit_per_step_is_for_the_processes_of_the_run(tmp_path: Path) -> None:
    limited = {"num_envs": 2, "vector": {"backend": "process", "step_timeout": 5.0}}
    (setting,) = plan([*PPO, limited], {"lr": [1e-3]}, [0], tmp_path)
    assert setting.jobs[0].settings["vector"]["step_timeout"] == 5.0


# --- the table ---


def ended(label: str, returns: list[float | None], steps: list[int | None], stop: float | None = None) -> Setting:
    jobs = [Job(f"{label}_seed={i}", Path(label), {"stop_return": stop}) for i in range(len(returns))]
    results = {
        job.name: {"final_return": ret, "env_steps_to_stop": n, "seconds": 2.0}
        for job, ret, n in zip(jobs, returns, steps, strict=True)
    }
    return Setting(label, {"lr": label}, jobs, results)


def test_mean_and_interval_of_the_final_return() -> None:
    # mean 20, standard deviation 10, t(2) = 4.3027: 20 ± 4.3027 * 10 / √3 = 20 ± 24.842
    (row,) = table([ended("a", [10.0, 20.0, 30.0], [None] * 3)])
    assert list(row) == ["lr", "seeds", "return_mean", "return_low", "return_high", "seconds"]
    assert (row["seeds"], row["return_mean"], row["seconds"]) == (3, 20.0, 2.0)
    assert row["return_low"] == pytest.approx(-4.842, abs=1e-3)
    assert row["return_high"] == pytest.approx(44.842, abs=1e-3)
    (alone,) = table([ended("a", [10.0], [None])])
    assert alone["return_mean"] == 10.0
    assert math.isnan(alone["return_low"])
    (nothing,) = table([ended("a", [], [])])
    assert math.isnan(nothing["return_mean"])
    assert cell(nothing["seconds"]) == ""


def test_the_best_mean_comes_first_and_what_never_ended_last() -> None:
    settings = [ended("none", [], []), ended("low", [1.0, 3.0], [None] * 2), ended("high", [2.0, 3.0], [None] * 2)]
    assert [setting.label for setting in ranked(settings)] == ["high", "low", "none"]


def test_with_a_return_to_stop_at_the_soonest_comes_first() -> None:
    settings = [
        ended("late", [480.0, 480.0], [3000, 5000], 475.0),
        ended("once", [500.0, 100.0], [100, None], 475.0),
        ended("soon", [476.0, 476.0], [1000, 2000], 475.0),
    ]
    order = ranked(settings)
    assert [setting.label for setting in order] == ["soon", "late", "once"]
    rows = table(order)
    assert [(row["reached"], row["env_steps_to_stop"]) for row in rows] == [(2, 1500.0), (2, 4000.0), (1, 100.0)]


# --- whole sweeps ---

SHORT = ["env_steps=256", "eval_every_steps=128", "rollout_steps=64", "minibatch_size=64", "num_envs=2"]
SHORT += ["eval_episodes=2", "tensorboard=false", "vector.backend=serial", "net.hidden_sizes=[8]"]


def test_a_failed_run_is_told_and_the_others_go_on(run_cli: Command) -> None:
    """Then again: what has ended is kept. Other settings in the same folders are refused."""
    words = ["sweep", "ppo", "env=dummy_envs:RaisingEnv,toy/match", "--seeds", "1-1", "--out", "all", *SHORT]
    code, out, err = run_cli(*words, "--workers", "2")
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
    failed.write_text(json.dumps({**result, "final_return": -1.0}))  # as if it had ended by now
    code, out, err = run_cli(*words)
    assert code == 0, err
    assert "2 runs in all, 2 of them done before; " in err
    assert Path("all/env=toy-match_seed=1/result.json").stat().st_mtime_ns == written
    assert Path("all/sweep.csv").read_text().splitlines()[2].startswith("dummy_envs:RaisingEnv,1,-1,")
    code, _, err = run_cli(*words, "lr=0.5")
    assert code == 2
    assert "holds a run with lr=" in err
    assert "not 0.5; choose another --out" in err


def test_after_a_kill_a_sweep_goes_on_and_ends_as_if_nothing_had_been(run_cli: Command, tmp_path: Path) -> None:
    words = ["sweep", "ppo", "--env", "dummy_envs:SlowEnv", "--seeds", "0", "--out", "all"]
    words += ["env_steps=1280", "checkpoint_every_steps=128", "eval_every_steps=0", *SHORT[2:]]
    process = subprocess.Popen(
        [sys.executable, "-m", "zhixing", *words],
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
    code, _, err = run_cli(*words)
    assert code == 0, err
    assert "done     seed=0" in err
    settings = plan([{"algorithm": "ppo", "env": "dummy_envs:SlowEnv"}], parse_values(words[8:]), [0], tmp_path)
    zx.Session(zx.config.build([settings[0].jobs[0].settings], {}), "whole", quiet=True).run()
    assert differing_tensors("all/seed=0", "whole") == []
