"""Tests of finding and grouping runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_runs import write_run

from zhixing.errors import UserError
from zhixing.reports.plots.runs import find_runs, group_runs, read_run


def test_find_runs_searches_two_levels_deep(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name) for name in ("a", "b/0", "b/1")]
    write_run(tmp_path / "b/c/too/deep")
    assert find_runs([tmp_path]) == runs
    assert find_runs([runs[1], tmp_path / "b"]) == runs[1:]  # each run once
    assert find_runs([runs[0]]) == [runs[0]]


def test_folder_without_runs_is_reported(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no run folder .*missing"):
        find_runs([tmp_path / "missing"])
    with pytest.raises(UserError, match=r"contains none.*config\.yaml"):
        find_runs([tmp_path])


def legends(*runs: Path) -> list[str]:
    return [configuration.legend for configuration in group_runs([read_run(run) for run in runs])]


def test_runs_that_differ_only_in_seed_are_one_configuration(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / str(seed), seed=seed, log_every=10 + seed) for seed in range(3)]
    assert legends(*runs) == ["ppo (3 seeds)"]
    assert legends(runs[1]) == ["ppo (seed 1)"]


def test_legend_has_only_the_settings_that_differ(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / "a", lr=0.001, net={"hidden_sizes": [64, 64]}, lr_schedule="linear"),
        write_run(tmp_path / "b", lr=0.01, net={"hidden_sizes": [64, 64]}, lr_schedule="linear"),
        write_run(tmp_path / "c", lr=0.001, net={"hidden_sizes": [32]}, lr_schedule=None),
    ]
    assert legends(*runs) == [
        "ppo lr=0.001 net.hidden_sizes=[64, 64] lr_schedule=linear (seed 0)",
        "ppo lr=0.01 net.hidden_sizes=[64, 64] lr_schedule=linear (seed 0)",
        "ppo lr=0.001 net.hidden_sizes=[32] lr_schedule=none (seed 0)",
    ]


def test_legend_ignores_differences_to_other_algorithms_and_envs(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / "a", lr=0.1),
        write_run(tmp_path / "b", lr=0.2, algorithm="dqn"),
        write_run(tmp_path / "c", lr=0.3, env="toy/reach"),
    ]
    assert legends(*runs) == ["ppo (seed 0)", "dqn (seed 0)", "ppo (seed 0)"]


def test_duplicate_seed_counts_once(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / "a", returns=[1, 2, 3]),
        write_run(tmp_path / "b", returns=[1, 2]),
        write_run(tmp_path / "c", returns=[1], seed=1),
    ]
    (configuration,) = group_runs([read_run(run) for run in runs])
    assert [run.path for run in configuration.runs] == [runs[0], runs[2]]
    assert configuration.legend == "ppo (2 seeds, 1 duplicate left out)"


@pytest.mark.parametrize("text", [None, "", "env_steps,sec", "env_steps,seconds,return_mean,eval_return_mean\n100,1"])
def test_run_without_rows_is_reported(tmp_path: Path, text: str | None) -> None:
    run = write_run(tmp_path / "young")
    (run / "metrics.csv").unlink()
    if text is not None:
        (run / "metrics.csv").write_text(text)
    with pytest.raises(UserError, match=r"the run .*young has no metrics yet"):
        read_run(run)


def test_invalid_run_folder_is_reported(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a")
    (run / "metrics.csv").write_text("step,reward\n1,2\n")
    with pytest.raises(UserError, match=r"metrics\.csv has no column env_steps"):
        read_run(run)
    (run / "config.yaml").write_text("algorithm: ppo\n")
    with pytest.raises(UserError, match=r"config\.yaml is not the configuration of a run: it has no env\.name"):
        read_run(run)


def test_legend_ignores_settings_without_effect_on_returns(tmp_path: Path) -> None:
    settings = [{"vector": {"backend": "serial", "workers": 1}, "num_threads": 1}]
    settings += [{"vector": {"backend": "process", "workers": 2}, "num_threads": 2}]
    runs = [write_run(tmp_path / str(i), seed=i, **setting) for i, setting in enumerate(settings)]
    assert [configuration.legend for configuration in group_runs([read_run(run) for run in runs])] == ["ppo (2 seeds)"]
