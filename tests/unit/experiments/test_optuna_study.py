"""Tests of studies: proposed values, pruning, resuming after a kill, and a complete study."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

pytest.importorskip("optuna")

from zhixing.cli import main
from zhixing.errors import UserError
from zhixing.experiments.jobs import Job, JobEvent
from zhixing.experiments.optuna_study import Study
from zhixing.experiments.tune import Choice, Range, SearchSpace

LAYERS = [{"algorithm": "ppo", "env": "toy/match"}, {"env_steps": 1000, "eval_every": 100, "seed": 40}]
SPACES: dict[str, SearchSpace] = {
    "lr": Range(1e-4, 1e-2, log=True),
    "epochs": Range(1, 8, integer=True),
    "net.hidden_sizes": Choice(["[8]", "[8,8]"]),
}


def make_study(out: Path, num_trials: int = 100) -> Study:
    return Study(LAYERS, SPACES, out, num_trials)


def next_job(study: Study) -> Job:
    job = study.next_job()
    assert job is not None
    return job


def evaluation(job: Job, steps: int, mean_return: float) -> JobEvent:
    data = {"steps": steps, "evaluation": steps // 100, "fraction": steps / 1000, "mean_return": mean_return}
    return JobEvent(job.name, "evaluation", data)


def run_trial(study: Study, returns: list[float]) -> bool:
    """Run a trial with these evaluation returns, and return whether it completed without being pruned."""
    job = next_job(study)
    for i, mean_return in enumerate(returns, 1):
        if not study.should_continue(evaluation(job, 100 * i + 28, mean_return)):
            study.finish_trial(job.name, {"final_return": mean_return})
            return False
    study.finish_trial(job.name, {"final_return": returns[-1]})
    return True


def test_trials_sample_from_the_spaces_with_different_seeds(tmp_path: Path) -> None:
    study = make_study(tmp_path, 6)
    jobs = [next_job(study) for _ in range(6)]
    assert study.next_job() is None
    assert [job.name for job in jobs] == [f"trial-000{i}" for i in range(6)]
    assert [job.settings["seed"] for job in jobs] == [40, 41, 42, 43, 44, 45]
    assert all(job.prunable and job.settings["num_threads"] == 1 for job in jobs)
    assert all(1e-4 <= job.settings["lr"] <= 1e-2 for job in jobs)
    assert len({job.settings["lr"] for job in jobs}) == 6
    assert all(job.settings["epochs"] in range(1, 9) for job in jobs)
    assert all(job.settings["net"]["hidden_sizes"] in ([8], [8, 8]) for job in jobs)


def test_trial_below_the_median_is_pruned_but_not_early_or_at_its_end(tmp_path: Path) -> None:
    study = make_study(tmp_path)
    for mean_return in (1.0, 2.0, 3.0, 4.0, 5.0):
        assert run_trial(study, [0.0, mean_return, mean_return])  # the five startup trials: their median is 3
    assert not run_trial(study, [-9.0, 2.9, 9.0])
    assert run_trial(study, [-9.0, 3.1, 3.1])
    late = next_job(study)
    assert study.should_continue(evaluation(late, 1000, -9.0))  # its budget is used up anyway
    study.finish_trial(late.name, {"final_return": -9.0})
    results = study.trials()
    assert [trial.state for trial in results] == ["complete"] * 5 + ["pruned", "complete", "complete"]
    assert [trial.mean_return for trial in results] == [1.0, 2.0, 3.0, 4.0, 5.0, 2.9, 3.1, -9.0]


def test_after_a_kill_interrupted_trials_come_first_and_new_ones_differ(tmp_path: Path) -> None:
    first = make_study(tmp_path)
    jobs = [next_job(first) for _ in range(4)]
    first.finish_trial(jobs[0].name, {"final_return": 1.0})
    first.should_continue(evaluation(jobs[1], 100, 5.0))
    first.study.ask()  # killed while its values were sampled
    ended = jobs[2]  # its run ended after the study was killed
    ended.folder.mkdir()
    (ended.folder / "config.yaml").write_text(yaml.safe_dump(dict(ended.settings)))
    (ended.folder / "result.json").write_text(json.dumps({"final_return": 7.0}))
    reopened = make_study(tmp_path, 7)
    resumed = next_job(reopened)
    assert resumed == jobs[1]
    assert reopened.should_continue(evaluation(resumed, 100, 5.0))  # a repeated report: the checkpoint was older
    assert next_job(reopened) == jobs[3]
    new = [next_job(reopened), next_job(reopened)]
    assert [job.name for job in new] == ["trial-0005", "trial-0006"]
    assert reopened.next_job() is None
    assert len({job.settings["lr"] for job in (*jobs, *new)}) == 6
    states = [trial.state for trial in reopened.trials()]
    assert states == ["complete", "running", "complete", "running", "failed", "running", "running"]
    assert reopened.trials()[2].mean_return == 7.0


def test_pruned_trial_stays_pruned_after_a_kill(tmp_path: Path) -> None:
    study = make_study(tmp_path)
    for _ in range(5):
        run_trial(study, [3.0, 3.0])
    bad = next_job(study)
    assert not study.should_continue(evaluation(bad, 200, 0.0))
    bad.folder.mkdir()
    (bad.folder / "config.yaml").write_text(yaml.safe_dump(dict(bad.settings)))
    (bad.folder / "result.json").write_text(json.dumps({"final_return": 0.0}))
    reopened = make_study(tmp_path, 6)
    assert reopened.next_job() is None
    assert reopened.trials()[5].state == "pruned"


def test_invalid_combination_fails_only_its_trial(tmp_path: Path) -> None:
    spaces: dict[str, SearchSpace] = {"shared_network": Choice(["false", "true"]), "gamma": Range(0.9, 1.0)}
    layers = [*LAYERS, {"critic_lr": 1e-3}]
    study = Study(layers, spaces, tmp_path, 12)
    shared = []
    while (job := study.next_job()) is not None:
        shared.append(job.settings["shared_network"])
        study.finish_trial(job.name, {"final_return": 0.0})
    failed = [trial for trial in study.trials() if trial.state == "failed"]
    assert set(shared) == {False}
    assert failed
    assert len(failed) + len(shared) == 12
    assert "shared_network=true has one optimizer for actor and critic: leave critic_lr" in failed[0].error


def test_folder_with_other_ranges_is_rejected(tmp_path: Path) -> None:
    make_study(tmp_path)
    with pytest.raises(UserError, match="choose another --out"):
        Study(LAYERS, {"lr": Range(1e-4, 1e-1)}, tmp_path, 1)


def test_complete_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    command = "zhixing tune ppo --env toy/match lr=1e-3..1e-2:log env_steps=128 rollout_steps=32 num_envs=2"
    command += " minibatch_size=64 eval_every=64 eval_episodes=2 tensorboard=false --out all --trials"
    monkeypatch.setattr("sys.argv", [*command.split(), "1"])
    main()
    assert "trial-0000" in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", [*command.split(), "2"])
    main()
    out, err = capsys.readouterr()
    assert "trial-0000" not in err
    assert "done     trial-0001  return" in err
    results = [json.loads(Path(f"all/trial-000{i}/result.json").read_text())["final_return"] for i in range(2)]
    rows = Path("all/trials.csv").read_text().splitlines()
    assert rows[0] == "trial,state,return,lr"
    assert float(rows[1].split(",")[2]) == pytest.approx(max(results))
    assert Path("all/trials.png").stat().st_size > 10_000
    assert yaml.safe_load(Path("all/best.yaml").read_text())["num_envs"] == 2
    assert "best.yaml" in out
