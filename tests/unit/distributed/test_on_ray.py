"""Workers on Ray: the same numbers, deaths that cost only what the dead held, and all schemes that take workers."""

from __future__ import annotations

import io
import math
import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import differing_tensors, metrics_rows

import zhixing as zx
from zhixing.config import RunConfig
from zhixing.core.learner import Gradients
from zhixing.core.optimizer import Optimizer
from zhixing.distributed.cluster import LOOPBACK, MAX_FOLDER, Cluster, _set_token
from zhixing.distributed.collector import DistributedCollector
from zhixing.distributed.parameter_servers import ParameterServers
from zhixing.experiments.executors import run_jobs
from zhixing.experiments.jobs import Job, JobEvent
from zhixing.experiments.ray_jobs import RayJobs
from zhixing.training.callbacks import Progress

Small = Callable[..., RunConfig]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """One Ray for all tests: starting it takes seconds."""
    pytest.importorskip("ray", reason="needs the extra 'ray': pip install 'zhixing[ray]'")
    cluster = Cluster()
    yield cluster
    cluster.close()


class At(zx.Callback):
    """Does something once, after so many steps."""

    def __init__(self, steps: int, what: Callable[[zx.TrainingLoop], None]) -> None:
        self.steps, self.what, self.done = steps, what, False

    def iteration_end(self, loop: zx.TrainingLoop, metrics: object) -> None:
        if loop.steps >= self.steps and not self.done:
            self.done = True
            self.what(loop)


def power_cut(loop: zx.TrainingLoop) -> None:
    raise RuntimeError("power cut")


def test_one_worker_does_what_none_does_and_goes_on_after_a_lost_driver(
    cluster: Cluster, short_config: Small, tmp_path: Path
) -> None:
    """Bit for bit: PPO in this process, and with a worker, whose driver is lost at 500 steps and comes back."""
    settings: dict[str, Any] = {"seed": 3, "checkpoint_every_steps": 200, "vector__backend": "serial"}
    zx.Session(short_config("ppo", **settings), tmp_path / "serial", quiet=True).run()
    cfg = short_config("ppo", distributed__workers=1, **settings)
    with pytest.raises(RuntimeError, match="power cut"):
        zx.Session(cfg, tmp_path / "worker", [At(500, power_cut)], quiet=True).run()
    zx.Session.resume(tmp_path / "worker", quiet=True).run()
    assert differing_tensors(tmp_path / "serial", tmp_path / "worker") == []
    assert metrics_rows(tmp_path / "serial") == metrics_rows(tmp_path / "worker")


def test_half_of_the_workers_killed_cost_only_the_steps_they_held(
    cluster: Cluster, short_config: Small, tmp_path: Path
) -> None:
    """4 workers with 2 environments each, 16 steps each: 128 steps per iteration, 8 iterations, whoever dies."""
    killed: list[int] = []

    def kill(loop: zx.TrainingLoop) -> None:
        assert isinstance(loop.collector, DistributedCollector)
        crew = loop.collector.crew
        for worker in (1, 3):
            crew.start(worker, None, "process_id")
        for _ in range(2):
            _, process = crew.wait()
            os.kill(process, signal.SIGKILL)
            killed.append(process)

    told = io.StringIO()
    cfg = short_config("ppo", env_steps=1024, num_envs=8, rollout_steps=16, distributed__workers=4)
    seen: list[tuple[int, int]] = []
    lengths: list[int] = []

    class Count(zx.Callback):
        def iteration_end(self, loop: zx.TrainingLoop, metrics: object) -> None:
            seen.append((loop.env_steps, loop.num_worker_restarts))

        def episode_end(self, loop: zx.TrainingLoop, episode: zx.Episode) -> None:
            lengths.append(episode.length)

    result = zx.Session(cfg, tmp_path / "run", [At(512, kill), Count(), Progress(told)], quiet=True).run()
    assert len(killed) == 2
    assert [steps for steps, _ in seen] == [128 * (i + 1) for i in range(8)]
    assert [lost for _, lost in seen] == [0] * 4 + [2] * 4
    assert result["env_steps"] == 1024
    # each env's unfinished steps are in no episode, and of the 4 environments that died those before it neither
    assert sum(lengths) <= 1024
    assert "2 workers restarted" in told.getvalue()


def test_rollouts_and_gradients_of_whoever_is_ready(cluster: Cluster, short_config: Small, tmp_path: Path) -> None:
    """A resumed run goes on counting where the checkpoint was; what workers held then is done again."""
    short = {"checkpoint_every_steps": 200, "eval_every_steps": 0}
    cfg = short_config("impala", distributed__workers=2, **short)
    with pytest.raises(RuntimeError, match="power cut"):
        zx.Session(cfg, tmp_path / "impala", [At(500, power_cut)], quiet=True).run()
    session = zx.Session.resume(tmp_path / "impala", quiet=True)
    assert session.loop.env_steps == 416  # the first multiple of 32 beyond 400
    result = session.run()
    assert (result["env_steps"], result["updates"]) == (1216, 38)  # 1200 steps by 32 from one environment: 37.5

    for name, workers in (("here", 0), ("there", 1)):  # alone, a worker on Ray does what an actor here does
        alone = short_config("a3c", distributed__workers=workers, actors=1, num_envs=1, **short)
        zx.Session(alone, tmp_path / name, quiet=True).run()
    assert differing_tensors(tmp_path / "here", tmp_path / "there") == []


def test_weights_on_servers_move_as_in_one_place(cluster: Cluster, short_config: Small, tmp_path: Path) -> None:
    """Bit for bit: three servers and one worker, whose driver is lost in between, and a run without any of them."""
    short: dict[str, Any] = {"checkpoint_every_steps": 200, "eval_every_steps": 300, "num_envs": 1, "anneal_lr": True}
    short["rollout_steps"] = 40
    zx.Session(short_config("a3c", actors=1, **short), tmp_path / "here", quiet=True).run()
    cfg = short_config("a3c", actors=1, distributed__workers=1, distributed__servers=3, **short)
    with pytest.raises(RuntimeError, match="power cut"):
        zx.Session(cfg, tmp_path / "there", [At(500, power_cut)], quiet=True).run()
    session = zx.Session.resume(tmp_path / "there", quiet=True)
    assert isinstance(session.collector, DistributedCollector)
    session.run()
    assert differing_tensors(tmp_path / "here", tmp_path / "there") == []
    assert metrics_rows(tmp_path / "here") == metrics_rows(tmp_path / "there")


def test_a_turn_moves_a_servers_weights_once(cluster: Cluster, short_config: Small, tmp_path: Path) -> None:
    """Also when the worker died before it could tell, and another did the turn again; a dead server is told."""
    cfg = short_config("a3c", actors=1, num_envs=1)
    env = zx.envs.make_vector(cfg.env.name, 1, backend="serial")
    learner, other = (zx.algorithms.get("a3c").make(cfg, env.spaces) for _ in range(2))
    env.close()
    servers = ParameterServers.start(cluster, 2)
    optimizer: Optimizer = learner.optimizer
    servers.load(optimizer)
    gradients = Gradients([torch.ones_like(optimizer.flat)], {})
    for worker, turn in ((0, 1), (0, 1), (1, 2)):
        servers.push(optimizer, gradients, 0.5, worker, turn)
    optimizer.lr = 0.5
    for _ in range(2):
        learner.apply_gradients(gradients)
    servers.pull(other.optimizer)
    assert torch.equal(other.optimizer.flat, optimizer.flat)

    nonfinite = Gradients([torch.full_like(optimizer.flat, math.nan)], {})
    assert servers.push(optimizer, nonfinite, 0.5, 0, 3) is None
    servers.pull(other.optimizer)
    assert torch.equal(other.optimizer.flat, optimizer.flat)

    cluster.ray.kill(servers.handles[1])
    with pytest.raises(zx.UserError, match="one of the 2 parameter servers died"):
        servers.pull(other.optimizer)


def test_two_workers_learn_through_servers(cluster: Cluster, short_config: Small, tmp_path: Path) -> None:
    cfg = short_config(
        "a3c", num_envs=2, distributed__workers=2, distributed__servers=2, eval_every_steps=0, rollout_steps=40
    )
    result = zx.Session(cfg, tmp_path / "run", quiet=True).run()
    assert (result["env_steps"], result["updates"]) == (1200, 30)  # 40 steps a turn
    state = zx.training.run_folder.RunFolder.open(tmp_path / "run").load()["loop"]["learner"]
    fresh = zx.Session(cfg, tmp_path / "fresh", quiet=True)
    fresh.close()
    moved = [
        not torch.equal(state["parts"]["net"][name], value) for name, value in fresh.learner.net.state_dict().items()
    ]
    assert all(moved)  # of all servers
    assert bool((state["parts"]["optimizer"]["second_moment"][0] > 0).any())


def test_replay_is_filled_by_workers_that_rate_what_they_did(
    cluster: Cluster, short_config: Small, tmp_path: Path
) -> None:
    settings = {"distributed__workers": 2, "train_every": 10, "replay__prioritized": True}
    session = zx.Session(short_config("dqn", **settings, num_envs=4, eval_every_steps=0), tmp_path / "dqn", quiet=True)
    rated: list[bool] = []

    def look(loop: zx.TrainingLoop) -> None:
        # new steps would all have the highest priority, if nobody had told how wrong the network was about them
        priorities = loop.buffer._priorities
        assert priorities is not None
        index = loop.buffer.ring.indices()
        rated.append(len(np.unique(priorities.priority[index % len(priorities.priority)])) > len(index) // 2)

    session.loop.callbacks.insert(0, At(100, look))
    result = session.run()
    assert rated == [True]
    assert result["env_steps"] == 1200
    assert result["updates"] == 500  # (1200 - 200 of warm-up) * 0.5


def test_environments_on_ray_show_the_same_numbers(cluster: Cluster) -> None:
    ray = zx.envs.make_vector("CartPole-v1", 3, backend="ray", workers=2)
    serial = zx.envs.make_vector("CartPole-v1", 3, backend="serial")
    rng = np.random.default_rng(0)
    assert np.array_equal(ray.reset(seed=5)[0], serial.reset(seed=5)[0])
    for _ in range(40):
        actions = rng.integers(0, 2, 3)
        mine, theirs = ray.step(actions), serial.step(actions)
        for one, other in zip(mine[:4], theirs[:4], strict=True):
            assert np.array_equal(one, other)
        ended = theirs[2] | theirs[3]
        if ended.any():
            assert np.array_equal(mine[4]["final_obs"][ended], theirs[4]["final_obs"][ended])
    state = ray.state_dict()
    ray.send(np.zeros(2, int), np.array([1, 2]))
    ids, obs, *_ = ray.recv(2)
    assert ids.tolist() == [1, 2]
    serial.load_state_dict(state)
    assert np.array_equal(obs, serial.step(np.zeros(3, int))[0][1:])
    ray.close()
    serial.close()


def test_a_sweep_on_ray_whose_runs_have_workers(cluster: Cluster, short_config: Small, tmp_path: Path) -> None:
    def job(name: str, **settings: Any) -> Job:
        cfg = short_config("a2c", env_steps=320, rollout_steps=5, num_threads=1, **settings)
        return Job(name, tmp_path / name, cfg.model_dump(mode="json"), prunable=True)

    todo = iter([job("good", distributed__workers=1), job("bad", env="dummy_envs:RaisingEnv")])
    executor = RayJobs(2)
    last: dict[str, JobEvent] = {}

    def on_event(event: JobEvent) -> None:
        if event.kind == "evaluation":
            executor.decide(event.job, True)
        last[event.job] = event

    run_jobs(executor, lambda: next(todo, None), on_event)
    assert last["good"].kind == "done"
    assert last["good"].data["env_steps"] == 320
    assert (last["bad"].kind, "the third step is broken" in last["bad"].data["error"]) == ("failed", True)
    assert "ZeroDivisionError" in (tmp_path / "output" / "bad.txt").read_text()


def test_ray_listens_on_this_machine_only(cluster: Cluster) -> None:
    assert cluster.ray.util.get_node_ip_address() == LOOPBACK
    import psutil  # comes with ray

    ours = psutil.Process().children(recursive=True)
    heard = {c.laddr.ip for process in ours for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN}
    assert heard <= {LOOPBACK, "::1", "::ffff:127.0.0.1"}


def test_nobody_else_gets_to_rays_files(cluster: Cluster) -> None:
    """Ray makes its folders writable for everybody: each must lie below one that only this user may enter."""
    session = Path(cluster.ray._private.worker.global_worker.node.get_session_dir_path())
    above = [folder for folder in session.parents if folder.stat().st_uid == os.geteuid() and folder.name]
    assert stat.S_IMODE((session / "logs").stat().st_mode) & 0o002, "Ray has stopped doing so: one folder is enough"
    assert any(stat.S_IMODE(folder.stat().st_mode) == 0o700 and "zhixing-" in folder.name for folder in above)
    longest = max(len(os.fsencode(path)) for path in (session / "sockets").iterdir())
    assert longest + MAX_FOLDER - len(tempfile.gettempdir()) <= 107  # what a socket's name may have


OUTSIDER = """
import sys
from ray._raylet import GcsClient
print(len(GcsClient(address=sys.argv[1]).get_all_node_info(timeout=20)))
"""


def test_without_the_token_ray_answers_nobody(cluster: Cluster) -> None:
    address = cluster.ray.get_runtime_context().gcs_address
    for mode, token, answer in (
        ("token", os.environ["RAY_AUTH_TOKEN"], "1\n"),
        ("token", "0" * 64, ""),
        ("disabled", "", ""),
    ):
        environment = {**os.environ, "RAY_AUTH_MODE": mode, "RAY_AUTH_TOKEN": token}
        command = [sys.executable, "-c", OUTSIDER, address]
        found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert found.stdout == answer
        assert answer or "Unauthenticated" in found.stderr or "AuthenticationError" in found.stderr, found.stderr[
            -2000:
        ]


def test_a_token_of_the_user_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason="needs the extra 'ray': pip install 'zhixing[ray]'")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "mine")
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    before = _set_token({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "other"})
    assert os.environ["RAY_AUTH_TOKEN"] == "other"
    _set_token(before)
    assert os.environ["RAY_AUTH_TOKEN"] == "mine"
    assert "RAY_AUTH_MODE" not in os.environ
