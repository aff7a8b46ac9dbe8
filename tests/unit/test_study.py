"""The study script: its statistics, its records, and a tiny study from the command line to the table."""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
pytestmark = pytest.mark.skipif(not BENCHMARKS.exists(), reason="only in a checkout")


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = importlib.import_module("study")
    monkeypatch.setattr(module, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(module, "RUNS", tmp_path / "runs")
    return module


@pytest.fixture
def estimates(study: ModuleType) -> ModuleType:
    return importlib.import_module("studies.estimates")


def runs_of(*finals: float, seconds: float = 10.0) -> dict[str, Any]:
    return {str(seed): {"final": final, "seconds": seconds} for seed, final in enumerate(finals)}


def test_interquartile_mean_drops_a_quarter_of_the_runs_at_either_end(estimates) -> None:
    mean = estimates.interquartile_mean
    assert mean([np.array([100.0, 1, 2, 3, -50])]) == 2  # one of five at either end
    assert mean([np.array([1.0, 2, 6])]) == 3  # none of three
    assert mean([np.array([0.0, 8, 1, 2]), np.array([3.0, 4, -9, 5])]) == 2.5  # (1 + 2 + 3 + 4) / 4, of both tasks


def test_probability_of_improvement_counts_ties_half_and_averages_tasks(estimates) -> None:
    probability = estimates.probability_of_improvement
    assert probability([np.array([1.0, 2, 3])], [np.array([2.0])]) == 0.5  # (0 + 0.5 + 1) / 3
    assert probability([np.array([1.0, 5])], [np.array([0.0, 3, 7])]) == 0.5  # 3 of 6 pairs
    tasks = [np.array([1.0]), np.array([0.0])], [np.array([0.0]), np.array([1.0, 0.0])]
    assert probability(*tasks) == (1 + 0.25) / 2


def test_bootstrap_interval_resamples_runs_within_each_task(estimates) -> None:
    interval, mean = estimates.interval, estimates.interquartile_mean
    assert interval(mean, [np.array([0.0, 1])]) == (0, 1)  # a quarter of the resamples is 0, 0, a quarter 1, 1
    assert interval(mean, [np.array([0.0, 0]), np.array([10.0, 10])]) == (5, 5)  # tasks aren't mixed
    low, high = interval(estimates.probability_of_improvement, [np.array([2.0, 3])], [np.array([1.0, 2.5])])
    assert (low, high) == (0, 1)
    # 95 % of the means of four resampled runs 0, 0, 1, 1: binomial(4, 1/2) without its tails of 1/16 each
    low, high = interval(lambda sample: sample[0].mean(-1), [np.array([0.0, 0, 1, 1])])
    assert (low, high) == (0, 1)


def test_table_compares_the_intervals(study) -> None:
    row = importlib.import_module("studies.rows").Row("ppo", "Acrobot-v1", 1_000, peer="PPO")
    cases = (((5, 6, 7), "ahead", "1.00"), ((1, 2, 3), "level", "0.39"), ((0, 0, 0), "behind", "0.00"))
    for finals, verdict, better in cases:
        results = {row.key: (runs_of(*finals), runs_of(1, 3, 3, seconds=25.0))}
        text = study.report.rows_table([row], results)
        assert verdict in text
        assert f"| {better} | 10 / 25 | 2.50 |" in text


def test_every_row_has_its_own_file_and_a_scratch_run_is_not_committed(study) -> None:
    for name, one in study.STUDIES.items():
        keys = [row.key for row in one.rows]
        assert len(set(keys)) == len(keys)
        for extra in ([], ["--seeds", "100"], ["--seeds", "0", "--settings", "lr=1e-3"], ["--env-steps", "64"]):
            jobs = study.plan(study.parse([name, *extra]))
            assert all(("choosing" in job.file.parts) == bool(extra) for job in jobs)
            files = {(job.file, job.seed) for job in jobs}
            assert len(files) == len(jobs)


def test_long_curves_are_thinned_and_keep_their_ends(study) -> None:
    job = study.plan(study.parse(["smoke"]))[0]
    study.record(job, {"curve": [[steps, 1 / 3] for steps in range(100)]})
    curve = json.loads(job.file.read_text())["0"]["curve"]
    assert len(curve) == 30
    assert (curve[0], curve[-1]) == ([0, 0.33333], [99, 0.33333])


def test_a_run_is_interrupted_at_the_deadline(study, tmp_path: Path) -> None:
    code = "import signal, time; signal.signal(15, lambda *_: exit('saved')); time.sleep(60)"
    with (tmp_path / "log").open("a+") as log, pytest.raises(KeyboardInterrupt):
        study.execute([sys.executable, "-c", code], log, time.monotonic() + 2)
    assert (tmp_path / "log").read_text() == "saved\n"


def test_study_records_each_run_once_and_continues_an_interrupted_one(study, monkeypatch, capfd) -> None:
    command = ["smoke", "--only", "ppo", "--seeds", "0"]
    study.main(command)
    (job,) = study.plan(study.parse(command))
    run = json.loads(job.file.read_text())["0"]
    assert run["env_steps"] == run["curve"][-1][0] == 1024
    assert run["machine"]["commit"] is not None
    (job.run / "result.json").unlink()  # as if it had been interrupted after its last checkpoint
    job.file.unlink()
    study.main(command)
    again = json.loads(job.file.read_text())["0"]
    assert [again[key] for key in ("final", "curve")] == [run[key] for key in ("final", "curve")]
    monkeypatch.setattr(study, "perform", lambda *_: pytest.fail("a recorded run is repeated"))
    study.main(command)
    study.main([*command, "--list"])
    assert "ours: 0   peer: -" in capfd.readouterr().out


def test_tables_and_images_are_written(study, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(study, "PAGE", tmp_path / "results.md")
    monkeypatch.setattr(study, "IMAGES", tmp_path / "images")
    study.PAGE.write_text("before\n<!-- defaults: begin -->\n<!-- defaults: end -->\nafter\n")
    command = ["defaults", "--only", "sac", "--env", "Reacher-v5", "--seeds", "0", "1"]
    for job in study.plan(study.parse(command)):
        final = -job.seed - 4.0 - (job.side == "ours")
        result = {"final": final, "seconds": 8.0, "curve": [[500, -9.0], [1_000 + job.seed, final]]}
        study.record(job, result)
    study.main([*command, "--table", "--images"])
    assert "before\n<!-- defaults: begin -->\n<!-- defaults: end -->" in study.PAGE.read_text()  # not all rows
    assert (tmp_path / "images" / "defaults-sac.png").stat().st_size > 5_000
    study.main(["defaults", "--table"])
    page = study.PAGE.read_text()
    scores = "-5.50 [-6.00, -5.00] | -4.50 [-5.00, -4.00] | level | 0.12"
    assert f"| `sac` | Reacher-v5 | 100,000 | 2 / 2 | {scores} | 8 / 8 | 1.00 |" in page
    assert "| `sac` | 1 | 0.12 [0.00, 0.50] | 1.00 |" in page
    assert page.endswith("<!-- defaults: end -->\nafter\n")
