"""Workers, parameter servers, environments and jobs on Ray, and the isolation of the Ray instance from other users."""

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
from contextlib import suppress
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
from zhixing.training.run_folder import RunFolder

ShortConfig = Callable[..., RunConfig]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """One Ray instance for all tests: starting it takes seconds."""
    pytest.importorskip("ray", reason="needs the extra 'ray': pip install 'zhixing[ray]'")
    cluster = Cluster()
    yield cluster
    cluster.close()


class CallAt(zx.Callback):
    """Calls a function once, at the end of the first iteration with at least so many steps."""

    def __init__(self, steps: int, function: Callable[[zx.TrainingLoop], None]) -> None:
        self.steps, self.function, self.called = steps, function, False

    def iteration_end(self, loop: zx.TrainingLoop, metrics: object) -> None:
        if loop.steps >= self.steps and not self.called:
            self.called = True
            self.function(loop)


def power_cut(loop: zx.TrainingLoop) -> None:
    raise RuntimeError("power cut")


def test_one_worker_equals_none_and_resumes_after_a_lost_driver(
    cluster: Cluster, short_config: ShortConfig, tmp_path: Path
) -> None:
    """PPO gives bit-identical runs without workers and with one worker, whose driver crashes after 500 steps."""
    settings: dict[str, Any] = {"seed": 3, "checkpoint_every": 200, "vector__backend": "serial"}
    zx.Session(short_config("ppo", **settings), tmp_path / "serial", quiet=True).run()
    cfg = short_config("ppo", distributed__workers=1, **settings)
    with pytest.raises(RuntimeError, match="power cut"):
        zx.Session(cfg, tmp_path / "worker", [CallAt(500, power_cut)], quiet=True).run()
    zx.Session.resume(tmp_path / "worker", quiet=True).run()
    assert differing_tensors(tmp_path / "serial", tmp_path / "worker") == []
    assert metrics_rows(tmp_path / "serial") == metrics_rows(tmp_path / "worker")


def test_killed_workers_lose_only_their_unfinished_steps(
    cluster: Cluster, short_config: ShortConfig, tmp_path: Path
) -> None:
    """4 workers with 2 environments and 16 steps each make 128 steps per iteration, 8 iterations, in any case."""
    killed: list[int] = []

    def kill_two_workers(loop: zx.TrainingLoop) -> None:
        assert isinstance(loop.collector, DistributedCollector)
        pool = loop.collector.pool
        for worker in (1, 3):
            pool.submit(worker, None, "process_id")
        for _ in range(2):
            _, process_id = pool.wait()
            os.kill(process_id, signal.SIGKILL)
            killed.append(process_id)

    progress = io.StringIO()
    cfg = short_config("ppo", env_steps=1024, num_envs=8, rollout_steps=16, distributed__workers=4)
    counts: list[tuple[int, int]] = []  # steps and restarted workers after each iteration
    lengths: list[int] = []

    class Record(zx.Callback):
        def iteration_end(self, loop: zx.TrainingLoop, metrics: object) -> None:
            counts.append((loop.env_steps, loop.num_worker_restarts))

        def episode_end(self, loop: zx.TrainingLoop, episode: zx.Episode) -> None:
            lengths.append(episode.length)

    callbacks = [CallAt(512, kill_two_workers), Record(), Progress(progress)]
    result = zx.Session(cfg, tmp_path / "run", callbacks, quiet=True).run()
    assert len(killed) == 2
    assert [steps for steps, _ in counts] == [128 * (i + 1) for i in range(8)]
    assert [restarts for _, restarts in counts] == [0] * 4 + [2] * 4
    assert result["env_steps"] == 1024
    # unfinished episodes aren't counted, and neither are those that the killed workers had begun
    assert sum(lengths) <= 1024
    assert "2 workers restarted" in progress.getvalue()


def test_resumed_asynchronous_run_continues_its_counters(
    cluster: Cluster, short_config: ShortConfig, tmp_path: Path
) -> None:
    short = {"checkpoint_every": 200, "eval_every": 0}
    cfg = short_config("impala", distributed__workers=2, **short)
    with pytest.raises(RuntimeError, match="power cut"):
        zx.Session(cfg, tmp_path / "run", [CallAt(500, power_cut)], quiet=True).run()
    session = zx.Session.resume(tmp_path / "run", quiet=True)
    assert session.loop.env_steps == 416  # the first multiple of 32 above 400
    result = session.run()
    assert (result["env_steps"], result["updates"]) == (1216, 38)  # 1200 steps by 32 from one environment: 37.5


def test_a3c_worker_on_ray_equals_one_in_this_process(
    cluster: Cluster, short_config: ShortConfig, tmp_path: Path
) -> None:
    for name, workers in (("local", 0), ("ray", 1)):
        cfg = short_config("a3c", distributed__workers=workers, actors=1, num_envs=1, eval_every=0)
        zx.Session(cfg, tmp_path / name, quiet=True).run()
    assert differing_tensors(tmp_path / "local", tmp_path / "ray") == []


def test_run_with_parameter_servers_equals_one_without(
    cluster: Cluster, short_config: ShortConfig, tmp_path: Path
) -> None:
    """The runs are bit-identical, with three servers and one worker, although the driver crashes after 500 steps."""
    settings: dict[str, Any] = {
        "actors": 1,
        "num_envs": 1,
        "rollout_steps": 40,
        "lr_schedule": "linear",
        "checkpoint_every": 200,
        "eval_every": 300,
    }
    zx.Session(short_config("a3c", **settings), tmp_path / "local", quiet=True).run()
    cfg = short_config("a3c", distributed__workers=1, distributed__servers=3, **settings)
    with pytest.raises(RuntimeError, match="power cut"):
        zx.Session(cfg, tmp_path / "servers", [CallAt(500, power_cut)], quiet=True).run()
    session = zx.Session.resume(tmp_path / "servers", quiet=True)
    assert isinstance(session.collector, DistributedCollector)
    session.run()
    assert differing_tensors(tmp_path / "local", tmp_path / "servers") == []
    assert metrics_rows(tmp_path / "local") == metrics_rows(tmp_path / "servers")


def test_servers_apply_the_gradient_of_a_rollout_once(cluster: Cluster, short_config: ShortConfig) -> None:
    """A restarted worker may send the gradient of a rollout a second time."""
    cfg = short_config("a3c", actors=1, num_envs=1)
    env = zx.envs.make_vector(cfg.env.name, 1, backend="serial")
    learner, other = (zx.algorithms.get("a3c").make(cfg, env.spaces) for _ in range(2))
    env.close()
    servers = ParameterServers.start(cluster, 2)
    optimizer: Optimizer = learner.optimizer
    servers.load(optimizer)
    gradients = Gradients([torch.ones_like(optimizer.flat)], {})
    for worker, rollout_id in ((0, 1), (0, 1), (1, 2)):
        servers.push(optimizer, gradients, 0.5, worker, rollout_id)
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


def test_two_workers_train_through_parameter_servers(
    cluster: Cluster, short_config: ShortConfig, tmp_path: Path
) -> None:
    cfg = short_config(
        "a3c", num_envs=2, distributed__workers=2, distributed__servers=2, eval_every=0, rollout_steps=40
    )
    result = zx.Session(cfg, tmp_path / "run", quiet=True).run()
    assert (result["env_steps"], result["updates"]) == (1200, 30)  # 40 steps per rollout
    state = RunFolder.open(tmp_path / "run").load()["loop"]["learner"]
    fresh = zx.Session(cfg, tmp_path / "fresh", quiet=True)
    fresh.close()
    changed = [
        not torch.equal(state["parts"]["net"][name], value) for name, value in fresh.learner.net.state_dict().items()
    ]
    assert all(changed)  # those on both servers
    assert bool((state["parts"]["optimizer"]["second_moment"][0] > 0).any())


def test_workers_compute_initial_priorities(cluster: Cluster, short_config: ShortConfig, tmp_path: Path) -> None:
    settings = {"distributed__workers": 2, "train_every": 10, "replay__prioritized": True}
    session = zx.Session(short_config("dqn", **settings, num_envs=4, eval_every=0), tmp_path / "dqn", quiet=True)
    mostly_distinct: list[bool] = []

    def count_distinct_priorities(loop: zx.TrainingLoop) -> None:
        # without priorities of the workers, all new steps would have the highest one
        priorities = loop.buffer._priorities
        assert priorities is not None
        index = loop.buffer.ring.indices()
        distinct = np.unique(priorities.priority[index % len(priorities.priority)])
        mostly_distinct.append(len(distinct) > len(index) // 2)

    session.loop.callbacks.insert(0, CallAt(100, count_distinct_priorities))
    result = session.run()
    assert mostly_distinct == [True]
    assert result["env_steps"] == 1200
    assert result["updates"] == 500  # (1200 - 200 before learning_starts) * 0.5


def test_envs_on_ray_equal_serial_envs(cluster: Cluster) -> None:
    ray = zx.envs.make_vector("CartPole-v1", 3, backend="ray", workers=2)
    serial = zx.envs.make_vector("CartPole-v1", 3, backend="serial")
    rng = np.random.default_rng(0)
    assert np.array_equal(ray.reset(seed=5)[0], serial.reset(seed=5)[0])
    for _ in range(40):
        actions = rng.integers(0, 2, 3)
        ray_step, serial_step = ray.step(actions), serial.step(actions)
        for array, expected in zip(ray_step[:4], serial_step[:4], strict=True):
            assert np.array_equal(array, expected)
        ended = serial_step[2] | serial_step[3]
        if ended.any():
            assert np.array_equal(ray_step[4]["final_obs"][ended], serial_step[4]["final_obs"][ended])
    state = ray.state_dict()
    ray.send(np.zeros(2, int), np.array([1, 2]))
    ids, obs, *_ = ray.recv(2)
    assert ids.tolist() == [1, 2]
    serial.load_state_dict(state)
    assert np.array_equal(obs, serial.step(np.zeros(3, int))[0][1:])
    ray.close()
    serial.close()


def test_lost_env_worker_is_replaced(cluster: Cluster) -> None:
    """The episodes of both its environments are truncated; the other worker's environment continues."""
    policy = zx.envs.FailurePolicy(on_crash="replace")
    envs = zx.envs.make_vector("CartPole-v1", 3, backend="ray", workers=2, failure_policy=policy)
    envs.reset(seed=5)
    before = envs.step(np.zeros(3, int))[0].copy()
    cluster.ray.kill(envs._workers[1])  # environments 1 and 2
    obs, reward, terminated, truncated, info = envs.step(np.zeros(3, int))
    assert truncated.tolist() == [False, True, True]
    assert terminated.tolist() == [False] * 3
    assert reward.tolist() == [1.0, 0.0, 0.0]
    assert np.array_equal(info["final_obs"][1:], before[1:])
    assert not np.array_equal(obs[1:], before[1:])
    assert envs.num_env_restarts == 2
    envs.close()


def test_sweep_on_ray_with_runs_that_have_workers(cluster: Cluster, short_config: ShortConfig, tmp_path: Path) -> None:
    def make_job(name: str, **settings: Any) -> Job:
        cfg = short_config("a2c", env_steps=320, rollout_steps=5, num_threads=1, **settings)
        return Job(name, tmp_path / name, cfg.model_dump(mode="json"), prunable=True)

    jobs = iter([make_job("good", distributed__workers=1), make_job("bad", env="dummy_envs:RaisingEnv")])
    executor = RayJobs(2)
    last: dict[str, JobEvent] = {}

    def on_event(event: JobEvent) -> None:
        if event.kind == "evaluation":
            executor.decide(event.job, True)
        last[event.job] = event

    run_jobs(executor, lambda: next(jobs, None), on_event)
    assert last["good"].kind == "done"
    assert last["good"].data["env_steps"] == 320
    assert last["bad"].kind == "failed"
    assert "the third step is broken" in last["bad"].data["error"]
    assert "ZeroDivisionError" in (tmp_path / "output" / "bad.txt").read_text()


def test_ray_listens_on_loopback_only(cluster: Cluster) -> None:
    assert cluster.ray.util.get_node_ip_address() == LOOPBACK
    import psutil  # a dependency of ray

    addresses = set()
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # workers of earlier tests may just be ending
            connections = child.net_connections("inet")
            addresses |= {connection.laddr.ip for connection in connections if connection.status == psutil.CONN_LISTEN}
    assert addresses
    assert addresses <= {LOOPBACK, "::1", "::ffff:127.0.0.1"}


def test_other_users_cannot_read_rays_files(cluster: Cluster) -> None:
    """Ray makes its folders writable for all users, so they must be in a folder that only this user can enter."""
    session = Path(cluster.ray._private.worker.global_worker.node.get_session_dir_path())
    parents = [folder for folder in session.parents if folder.stat().st_uid == os.geteuid() and folder.name]
    assert stat.S_IMODE((session / "logs").stat().st_mode) & 0o002, "Ray no longer does; the outer folder is obsolete"
    assert any(stat.S_IMODE(folder.stat().st_mode) == 0o700 and "zhixing-" in folder.name for folder in parents)
    longest = max(len(os.fsencode(path)) for path in (session / "sockets").iterdir())
    assert longest + MAX_FOLDER - len(tempfile.gettempdir()) <= 107  # the longest allowed path of a socket


CLIENT = """
import sys
from ray._raylet import GcsClient
print(len(GcsClient(address=sys.argv[1]).get_all_node_info(timeout=20)))
"""


def test_ray_rejects_clients_without_the_token(cluster: Cluster) -> None:
    address = cluster.ray.get_runtime_context().gcs_address
    for mode, token, expected in (
        ("token", os.environ["RAY_AUTH_TOKEN"], "1\n"),
        ("token", "0" * 64, ""),
        ("disabled", "", ""),
    ):
        env = {**os.environ, "RAY_AUTH_MODE": mode, "RAY_AUTH_TOKEN": token}
        command = [sys.executable, "-c", CLIENT, address]
        process = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
        assert process.stdout == expected
        if not expected:
            assert "Unauthenticated" in process.stderr or "AuthenticationError" in process.stderr, process.stderr[
                -2000:
            ]


def test_token_of_the_user_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason="needs the extra 'ray': pip install 'zhixing[ray]'")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "user")
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    before = _set_token({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "ours"})
    assert os.environ["RAY_AUTH_TOKEN"] == "ours"
    _set_token(before)
    assert os.environ["RAY_AUTH_TOKEN"] == "user"
    assert "RAY_AUTH_MODE" not in os.environ
