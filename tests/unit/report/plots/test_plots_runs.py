from __future__ import annotations

from pathlib import Path

import pytest
from written_runs import write_run

from zhixing.errors import UserError
from zhixing.report.plots.runs import find_runs, group, read_run


def test_runs_are_found_up_to_two_levels_below(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name) for name in ("a", "b/0", "b/1")]
    write_run(tmp_path / "b/c/too/deep")
    assert find_runs([tmp_path]) == runs
    assert find_runs([runs[1], tmp_path / "b"]) == runs[1:]  # none twice
    assert find_runs([runs[0]]) == [runs[0]]


def test_folder_without_runs_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no run folder .*nix"):
        find_runs([tmp_path / "nix"])
    with pytest.raises(UserError, match=r"holds none.*config\.yaml"):
        find_runs([tmp_path])


def labels(*runs: Path) -> list[str]:
    return [configuration.legend for configuration in group([read_run(run) for run in runs])]


def test_runs_that_differ_only_in_seed_are_one_configuration(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / str(seed), seed=seed, log_every_steps=10 + seed) for seed in range(3)]
    assert labels(*runs) == ["ppo (3 seeds)"]
    assert labels(runs[1]) == ["ppo (seed 1)"]


def test_legend_has_only_what_differs(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / "a", lr=0.001, net={"hidden_sizes": [64, 64]}, anneal_lr=True),
        write_run(tmp_path / "b", lr=0.01, net={"hidden_sizes": [64, 64]}, anneal_lr=True),
        write_run(tmp_path / "c", lr=0.001, net={"hidden_sizes": [32]}, anneal_lr=None),
    ]
    assert labels(*runs) == [
        "ppo lr=0.001 net.hidden_sizes=[64, 64] anneal_lr=true (seed 0)",
        "ppo lr=0.01 net.hidden_sizes=[64, 64] anneal_lr=true (seed 0)",
        "ppo lr=0.001 net.hidden_sizes=[32] anneal_lr=none (seed 0)",
    ]


def test_other_algorithms_and_tasks_add_no_settings_to_the_legend(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / "a", lr=0.1),
        write_run(tmp_path / "b", lr=0.2, algorithm="dqn"),
        write_run(tmp_path / "c", lr=0.3, env="toy/reach"),
    ]
    assert labels(*runs) == ["ppo (seed 0)", "dqn (seed 0)", "ppo (seed 0)"]


def test_repeated_seed_counts_once_and_is_told(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / "a", returns=[1, 2, 3]),
        write_run(tmp_path / "b", returns=[1, 2]),
        write_run(tmp_path / "c", returns=[1], seed=1),
    ]
    (configuration,) = group([read_run(run) for run in runs])
    assert [run.path for run in configuration.runs] == [runs[0], runs[2]]
    assert configuration.legend == "ppo (2 seeds, without 1 repeated)"


@pytest.mark.parametrize("text", [None, "", "env_steps,sec", "env_steps,seconds,return_mean,eval_return_mean\n100,1"])
def test_run_without_rows_is_named(tmp_path: Path, text: str | None) -> None:
    run = write_run(tmp_path / "young")
    (run / "metrics.csv").unlink()
    if text is not None:
        (run / "metrics.csv").write_text(text)
    with pytest.raises(UserError, match=r"the run .*young has no rows of metrics yet"):
        read_run(run)


def test_folder_that_is_no_run_of_ours_is_named(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a")
    (run / "metrics.csv").write_text("step,reward\n1,2\n")
    with pytest.raises(UserError, match=r"metrics\.csv has no column env_steps"):
        read_run(run)
    (run / "config.yaml").write_text("algorithm: ppo\n")
    with pytest.raises(UserError, match=r"config\.yaml is no configuration of a run: it lacks env\.name"):
        read_run(run)


def test_what_cannot_change_a_return_is_not_in_the_legend(tmp_path: Path) -> None:
    settings = [{"vector": {"backend": "serial", "workers": 1}, "num_threads": 1}]
    settings += [{"vector": {"backend": "process", "workers": 2}, "num_threads": 2}]
    runs = [write_run(tmp_path / str(i), seed=i, **setting) for i, setting in enumerate(settings)]
    assert [configuration.legend for configuration in group([read_run(run) for run in runs])] == ["ppo (2 seeds)"]
