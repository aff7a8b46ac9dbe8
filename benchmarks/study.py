"""Learning studies: zhixing and a peer library train on the same environments for the same number of steps.

    python benchmarks/study.py defaults                                all runs that are still missing
    python benchmarks/study.py defaults --only ppo dqn --env LunarLander-v3 --side ours --seeds 0 1 2 --minutes 120
    python benchmarks/study.py defaults --list                         the rows and which seeds are done
    python benchmarks/study.py defaults --table                        write docs/results.md; --images draws curves

Each run is a process on one thread. Its final score is the mean return of fresh evaluation episodes, greedy on both
sides. Its time is the CPU time of all its processes, evaluations included, which other work on the machine hardly
changes. A finished run is recorded at once in benchmarks/results/study/STUDY/SIDE/ROW.json and not repeated. You can
interrupt a study at any time: our run continues from its checkpoint (`zhixing resume`), a peer's starts again. Several
processes can work on one study; each run belongs to one of them. `taskset -c 0` keeps a study on one core.

Settings are chosen on seeds from 100, results are shown for seeds from 0. Runs with seeds from 100, `--settings`,
`--env-steps` or `--num-envs` are recorded in benchmarks/results/study/choosing, which isn't committed, and tabulated at
the end.

The studies are defined in studies/rows.py. The virtual environments of both sides are created when they are first
needed, in benchmarks/.venvs or in the folder that the environment variable BENCHMARK_VENVS names.
"""

from __future__ import annotations

import argparse
import csv
import fcntl
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from common import HERE, ONE_THREAD, ROOT, machine_info, peer_python, read_results, write_page
from peers import sb3_study
from studies import report
from studies.rows import STUDIES, TIME_LIMITS, Row, Study

RESULTS = HERE / "results" / "study"
RUNS = ROOT / "runs" / "study"
PAGE = ROOT / "docs" / "results.md"
IMAGES = ROOT / "docs" / "pictures"
SIDES = ("ours", "peer")
OURS = [".[mujoco,box2d,toy-text]", "mujoco==3.17.0", "minigrid==3.2.0", "minatar==1.0.15"]
EVALUATIONS, EVAL_EPISODES, MAX_POINTS = 20, 10, 30
FIRST_CHOOSING_SEED = 100


class RunFailedError(Exception):
    pass


@dataclass(frozen=True)
class Job:
    """A run of one side, its folder and the file that records it."""

    row: Row
    side: str
    seed: int
    study: Study
    results: Path
    runs: Path
    changes: tuple[str, ...]  # of the row, from the command line
    settings: tuple[str, ...]  # ours, from the command line

    @property
    def file(self) -> Path:
        return self.results / self.side / f"{self.name}.json"

    @property
    def run(self) -> Path:
        return self.runs / self.side / self.name / str(self.seed)

    @property
    def name(self) -> str:
        settings = self.settings if self.side == "ours" else ()
        return re.sub(r"[^\w.,=-]+", "_", ",".join([self.row.key, *self.changes, *settings]))

    @property
    def recorded(self) -> bool:
        return str(self.seed) in read_results(self.file)


# --- runs of ours and of the peer ---


def python_of(side: str, study: Study) -> Path:
    if side == "peer":
        return peer_python("study-sb3", sb3_study.REQUIREMENTS, constrained=False)
    return peer_python("study-ours", OURS) if study.extras else Path(sys.executable)


def execute(command: Sequence[str | Path], log: IO[str], deadline: float | None = None, path: Path = ROOT) -> None:
    """Run a command with its output in `log`. Interrupt it at the deadline, or when the study is interrupted."""
    environment = {**os.environ, **ONE_THREAD, "PYTHONPATH": str(path)}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        code = process.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
    except (KeyboardInterrupt, subprocess.TimeoutExpired):
        process.terminate()  # ours saves a checkpoint
        process.wait()
        raise KeyboardInterrupt from None
    if code:
        raise RunFailedError(f"exit code {code}, see {log.name}")


def env_arguments(row: Row) -> list[str]:
    if row.env.startswith("MiniGrid-"):
        return ["--env", f"{HERE / 'studies' / 'envs.py'}:flat_minigrid", f"env.id={row.env}"]
    limit = [f"env.max_episode_steps={TIME_LIMITS[row.env]}"] if row.env in TIME_LIMITS else []
    return ["--env", f"minatar:{row.env}" if row.env.startswith("MinAtar/") else row.env, *limit]


def run_ours(job: Job, log: IO[str], deadline: float | None) -> dict[str, Any]:
    """Train, or continue to train, and evaluate through the command line of zhixing."""
    row, run = job.row, job.run
    zhixing = [python_of("ours", job.study), "-m", "zhixing"]
    settings = {
        "env_steps": row.env_steps,
        "eval_every": row.env_steps // EVALUATIONS,
        "eval_episodes": EVAL_EPISODES,
        "log_every": row.env_steps // EVALUATIONS,
        "checkpoint_every": row.env_steps // 10,
        "keep_checkpoints": 1,
        "tensorboard": False,
        "num_threads": 1,
        **({} if row.num_envs is None else {"num_envs": row.num_envs}),
        **job.study.settings,
        **row.settings,
    }
    arguments = [f"{name}={json.dumps(value)}" for name, value in settings.items()]
    if (run / "config.yaml").exists():
        if not (run / "result.json").exists():
            execute([*zhixing, "resume", run], log, deadline)
    else:
        options = [*env_arguments(row), "--seed", str(job.seed), "--out", str(run)]
        execute([*zhixing, "train", row.algorithm, *options, *arguments, *job.settings], log, deadline)
    log.truncate(0)
    seed = str(job.seed + 1_000)
    execute([*zhixing, "eval", run, "--episodes", str(row.episodes), "--seed", seed, "--json"], log, deadline)
    evaluation, result = last_line(log), json.loads((run / "result.json").read_text())
    with (run / "metrics.csv").open() as file:
        points = [line for line in csv.DictReader(file) if line["eval_return_mean"]]
    shutil.rmtree(run / "replay", ignore_errors=True)
    return {
        "env_steps": result["env_steps"],
        "final": evaluation["mean_return"],
        "std": evaluation["std_return"],
        "curve": [[int(float(line["env_steps"])), float(line["eval_return_mean"])] for line in points],
    }


def run_peer(job: Job, log: IO[str], deadline: float | None) -> dict[str, Any]:
    row = job.row
    work = {
        "peer": row.peer,
        "env": row.env,
        "max_episode_steps": TIME_LIMITS.get(row.env),
        "num_envs": row.num_envs,
        "seed": job.seed,
        "settings": job.study.peer_settings,
        "env_steps": row.env_steps,
        "eval_every": row.env_steps // EVALUATIONS,
        "eval_episodes": EVAL_EPISODES,
        "episodes": row.episodes,
    }
    command = [python_of("peer", job.study), "-m", "peers.sb3_study", json.dumps(work)]
    execute(command, log, path=HERE)  # without a deadline, because it can't continue
    return last_line(log)


def last_line(log: IO[str]) -> dict[str, Any]:
    return json.loads(next(line for line in reversed(Path(log.name).read_text().splitlines()) if line.startswith("{")))


# --- records ---


@contextmanager
def locked(file: Path, *, wait: bool) -> Iterator[IO[str] | None]:
    """Open and lock a file; yield None if another process has locked it and `wait` is false."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a+") as opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield None
        else:
            yield opened


def record(job: Job, result: dict[str, Any]) -> None:
    """Add a run to its file, with one line per seed. Readers see the old file or the new one."""
    points = result["curve"]
    kept = [points[i * (len(points) - 1) // (MAX_POINTS - 1)] for i in range(MAX_POINTS)]
    result["curve"] = [
        [steps, float(f"{value:.5g}")] for steps, value in (kept if len(points) > MAX_POINTS else points)
    ]
    with locked(job.runs / "lock", wait=True):
        runs = {**read_results(job.file), str(job.seed): result}
        lines = [f'"{seed}": {json.dumps(runs[seed])}' for seed in sorted(runs, key=int)]
        job.file.parent.mkdir(parents=True, exist_ok=True)
        new = job.file.with_suffix(".new")
        new.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        new.replace(job.file)


def commit() -> str:
    git = ["git", "-C", str(ROOT)]
    name = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout
    changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", "zhixing"], check=False).returncode
    return name.strip() + ("-dirty" if changed else "")


def cpu_seconds() -> float:
    """Return the CPU time of all processes that this one started and that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def perform(job: Job, deadline: float | None) -> str:
    """Train and evaluate one run and record it. Return a summary."""
    with locked(job.run.with_suffix(".log"), wait=False) as log:  # the run's process keeps the lock if this one dies
        if log is None:
            return "another process works on it"
        log.truncate(0)
        file = job.run.with_suffix(".origin.json")
        resumes = job.side == "ours" and (job.run / "config.yaml").exists() and file.exists()
        origin = {"seconds": 0.0, "machine": {**machine_info(), "commit": commit()}}  # of the start of the run
        if resumes:
            origin = json.loads(file.read_text())
        python_of(job.side, job.study)  # creates the virtual environment, which does not count
        before = cpu_seconds()
        try:
            result = (run_ours if job.side == "ours" else run_peer)(job, log, deadline)
        finally:
            origin["seconds"] = round(origin["seconds"] + cpu_seconds() - before, 1)
            file.write_text(json.dumps(origin))
        record(job, {**result, **origin})
        return f"{result['final']:.4g} after {result['env_steps']:,} steps, {origin['seconds']:,.0f} s"


# --- command line ---


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--only", nargs="+", default=[], metavar="ALGORITHM", help="only these algorithms")
    parser.add_argument("--env", nargs="+", default=[], help="only these environments")
    parser.add_argument("--side", choices=[*SIDES, "both"], default="both")
    parser.add_argument("--seeds", nargs="+", type=int, help="instead of the row's")
    parser.add_argument("--minutes", type=float, help="stop after this time; a run of the peer finishes first")
    parser.add_argument("--again", action="store_true", help="repeat runs that are recorded")
    parser.add_argument(
        "--settings", nargs="+", default=[], metavar="NAME=VALUE", help="additional settings of zhixing"
    )
    parser.add_argument("--env-steps", type=int, help="instead of the row's, for both libraries")
    parser.add_argument("--num-envs", type=int, help="instead of the row's, for both libraries")
    parser.add_argument("--list", action="store_true", help="list rows and finished seeds and stop")
    parser.add_argument("--table", action="store_true", help="write the tables to docs/results.md and stop")
    parser.add_argument("--images", action="store_true", help="the same, with images in docs/pictures")
    return parser.parse_args(arguments)


def plan(args: argparse.Namespace) -> list[Job]:
    """Return the selected jobs, ordered by seed."""
    study = STUDIES[args.study]
    rows = [row for row in study.rows if not args.only or row.title in args.only]
    rows = [row for row in rows if not args.env or row.env in args.env]
    if not rows:
        sys.exit(f"{args.study} has no such row; see --list")
    changes = {name: getattr(args, name) for name in ("env_steps", "num_envs") if getattr(args, name)}
    choosing = args.settings or changes or max(args.seeds or [0]) >= FIRST_CHOOSING_SEED
    places = [place / "choosing" / args.study if choosing else place / args.study for place in (RESULTS, RUNS)]
    labels = tuple(f"{name}={value}" for name, value in changes.items())
    jobs = [
        Job(replace(row, **changes), side, seed, study, *places, labels, tuple(args.settings))
        for row in rows
        for side in SIDES
        for seed in (args.seeds or range(row.seeds))
        if args.side in (side, "both") and (side == "ours" or row.peer)
    ]
    return sorted(jobs, key=lambda job: job.seed)


def results_of(jobs: Sequence[Job]) -> tuple[list[Row], report.Results]:
    """Return the rows of jobs and the recorded runs of both sides."""
    results = {job.row.key: tuple(read_results(replace(job, side=side).file) for side in SIDES) for job in jobs}
    return list({job.row.key: job.row for job in jobs}.values()), results


def publish(args: argparse.Namespace, jobs: Sequence[Job]) -> None:
    """Print the tables. Write them to the page if all rows were args for, and the images if those were."""
    rows, results = results_of(jobs)
    text = f"{report.rows_table(rows, results)}\n\n{report.algorithms_table(rows, results)}"
    print(text)
    if jobs[0].results != RESULTS / args.study:
        return
    if not args.only and not args.env and f"<!-- {args.study}: begin -->" in PAGE.read_text(encoding="utf-8"):
        write_page(PAGE, args.study, text)
    for title in dict.fromkeys(row.title for row in rows) if args.images else ():
        image = IMAGES / f"{args.study}-{title.replace(' ', '-')}.png"
        report.draw([row for row in rows if row.title == title], results, image)


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    jobs = plan(args)
    if args.list:
        rows, results = results_of(jobs)
        for row in rows:
            done = [f"{side}: {' '.join(runs) or '-'}" for side, runs in zip(SIDES, results[row.key], strict=True)]
            print(f"{row.title:14} {row.env:26} {row.env_steps:>9,}   {'   '.join(done)}")
        return
    if args.table or args.images:
        publish(args, jobs)
        return
    deadline = None if args.minutes is None else time.monotonic() + 60 * args.minutes
    failed = 0
    for job in jobs:
        if args.again:
            shutil.rmtree(job.run, ignore_errors=True)
        elif job.recorded:
            continue
        if deadline is not None and time.monotonic() > deadline:
            print("out of time; run the same command to continue")
            break
        title = f"{job.row.key}, {job.side}, seed {job.seed}"
        try:
            print(f"{title}: {perform(job, deadline)}", flush=True)
        except RunFailedError as error:
            failed += 1
            print(f"{title}: failed, {error}", flush=True)
        except KeyboardInterrupt:
            sys.exit(f"{title}: stopped; run the same command to continue")
    if jobs[0].results != RESULTS / args.study:
        publish(args, jobs)
    if failed:
        sys.exit(f"{failed} runs failed; run the same command to repeat them")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    main()
