"""Studies: what is tried, what is pruned, what a kill leaves, and a whole one."""

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
from zhixing.experiments.tune import Choice, Range, Space

LAYERS = [{"algorithm": "ppo", "env": "toy/match"}, {"env_steps": 1000, "eval_every_steps": 100, "seed": 40}]
SPACES: dict[str, Space] = {
    "lr": Range(1e-4, 1e-2, log=True),
    "epochs": Range(1, 8, whole=True),
    "net.hidden_sizes": Choice(["[8]", "[8,8]"]),
}


def study(out: Path, trials: int = 100) -> Study:
    return Study(LAYERS, SPACES, out, trials)


def begun(mine: Study) -> Job:
    job = mine.next_job()
    assert job is not None
    return job


def evaluated(job: Job, steps: int, ret: float) -> JobEvent:
    return JobEvent(job.name, "evaluation", {"steps": steps, "fraction": steps / 1000, "ret": ret})


def run_through(mine: Study, returns: list[float]) -> bool:
    """A trial with an evaluation of each return; whether it came to its end."""
    job = begun(mine)
    for i, ret in enumerate(returns, 1):
        if not mine.go_on(evaluated(job, 100 * i + 28, ret)):
            mine.end(job.name, {"final_return": ret})
            return False
    mine.end(job.name, {"final_return": returns[-1]})
    return True


def test_trials_draw_from_the_spaces_with_a_seed_each(tmp_path: Path) -> None:
    mine = study(tmp_path, 6)
    jobs = [begun(mine) for _ in range(6)]
    assert mine.next_job() is None
    assert [job.name for job in jobs] == [f"trial-000{i}" for i in range(6)]
    assert [job.settings["seed"] for job in jobs] == [40, 41, 42, 43, 44, 45]
    assert all(job.asks and job.settings["num_threads"] == 1 for job in jobs)
    assert all(1e-4 <= job.settings["lr"] <= 1e-2 for job in jobs)
    assert len({job.settings["lr"] for job in jobs}) == 6
    assert all(job.settings["epochs"] in range(1, 9) for job in jobs)
    assert all(job.settings["net"]["hidden_sizes"] in ([8], [8, 8]) for job in jobs)


def test_a_trial_below_the_median_is_pruned_but_neither_early_nor_at_its_end(tmp_path: Path) -> None:
    mine = study(tmp_path)
    for ret in (1.0, 2.0, 3.0, 4.0, 5.0):
        assert run_through(mine, [0.0, ret, ret])  # five that all others are judged by: their median is 3
    assert not run_through(mine, [-9.0, 2.9, 9.0])
    assert run_through(mine, [-9.0, 3.1, 3.1])
    late = begun(mine)
    assert mine.go_on(evaluated(late, 1000, -9.0))  # it has ended anyway
    mine.end(late.name, {"final_return": -9.0})
    found = mine.outcomes()
    assert [one.state for one in found] == ["complete"] * 5 + ["pruned", "complete", "complete"]
    assert [one.ret for one in found] == [1.0, 2.0, 3.0, 4.0, 5.0, 2.9, 3.1, -9.0]


def test_after_a_kill_the_interrupted_come_first_and_new_ones_are_new(tmp_path: Path) -> None:
    first = study(tmp_path)
    jobs = [begun(first) for _ in range(4)]
    first.end(jobs[0].name, {"final_return": 1.0})
    first.go_on(evaluated(jobs[1], 100, 5.0))
    first.study.ask()  # killed while it was drawn
    ended = jobs[2]  # it ended after the kill of this process
    ended.folder.mkdir()
    (ended.folder / "config.yaml").write_text(yaml.safe_dump(dict(ended.settings)))
    (ended.folder / "result.json").write_text(json.dumps({"final_return": 7.0}))
    again = study(tmp_path, 7)
    goes_on = begun(again)
    assert goes_on == jobs[1]
    assert again.go_on(evaluated(goes_on, 100, 5.0))  # told before: the checkpoint was older
    assert begun(again) == jobs[3]
    new = [begun(again), begun(again)]
    assert [job.name for job in new] == ["trial-0005", "trial-0006"]
    assert again.next_job() is None
    assert len({job.settings["lr"] for job in (*jobs, *new)}) == 6
    states = [one.state for one in again.outcomes()]
    assert states == ["complete", "running", "complete", "running", "failed", "running", "running"]
    assert again.outcomes()[2].ret == 7.0


def test_one_that_was_to_be_pruned_stays_so_after_a_kill(tmp_path: Path) -> None:
    mine = study(tmp_path)
    for _ in range(5):
        run_through(mine, [3.0, 3.0])
    bad = begun(mine)
    assert not mine.go_on(evaluated(bad, 200, 0.0))
    bad.folder.mkdir()
    (bad.folder / "config.yaml").write_text(yaml.safe_dump(dict(bad.settings)))
    (bad.folder / "result.json").write_text(json.dumps({"final_return": 0.0}))
    again = study(tmp_path, 6)
    assert again.next_job() is None
    assert again.outcomes()[5].state == "pruned"


def test_a_combination_that_makes_no_sense_fails_alone(tmp_path: Path) -> None:
    spaces: dict[str, Space] = {"shared_network": Choice(["false", "true"]), "gamma": Range(0.9, 1.0)}
    layers = [*LAYERS, {"critic_lr": 1e-3}]
    mine = Study(layers, spaces, tmp_path, 12)
    shared = []
    while (job := mine.next_job()) is not None:
        shared.append(job.settings["shared_network"])
        mine.end(job.name, {"final_return": 0.0})
    failed = [one for one in mine.outcomes() if one.state == "failed"]
    assert set(shared) == {False}
    assert failed
    assert len(failed) + len(shared) == 12
    assert "shared_network=true allows no critic_lr" in failed[0].error


def test_another_question_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    study(tmp_path)
    with pytest.raises(UserError, match="choose another --out"):
        Study(LAYERS, {"lr": Range(1e-4, 1e-1)}, tmp_path, 1)


def test_a_whole_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    words = "zhixing tune ppo --env toy/match lr=1e-3..1e-2:log env_steps=128 rollout_steps=32 num_envs=2"
    words += " minibatch_size=64 eval_every_steps=64 eval_episodes=2 tensorboard=false --out all --trials"
    monkeypatch.setattr("sys.argv", [*words.split(), "1"])
    main()
    assert "trial-0000" in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", [*words.split(), "2"])
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
