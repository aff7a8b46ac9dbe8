"""Data-parallel learners: each runs the train step on a shard of the (mini)batch, and gradients are averaged over all.

The learner of the run has rank 0. The other learners are processes with copies of its networks and optimizers.
Rank 0 broadcasts its networks before each step, so changes between steps (normalizers, phases of other losses) reach
all learners, and sends the state of its optimizers whenever it has changed outside of a shared step.
"""

from __future__ import annotations

import contextlib
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch import distributed as dist

from zhixing.core.batch import Batch
from zhixing.core.learner import StepMethod, Update
from zhixing.core.seeding import derive_seed
from zhixing.core.spaces import Spaces
from zhixing.core.tree import tree_leaves, tree_map
from zhixing.envs import portable
from zhixing.errors import UserError
from zhixing.utils.importing import child_environment

if TYPE_CHECKING:
    from zhixing.config import RunConfig
    from zhixing.core.learner import Learner

LOOPBACK = "127.0.0.1"
TIMEOUT = timedelta(minutes=10)  # of rank 0; the other ranks have none: between steps, rank 0 collects and evaluates
# rank 0 alone handles signals: it saves a checkpoint and then ends the other learners
PROGRAM = """
import os, pickle, signal, sys, traceback
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
from zhixing.distributed.learner_group import serve
try:
    serve(*pickle.load(sys.stdin.buffer))
except BaseException:
    traceback.print_exc()
    sys.stderr.flush()
    os._exit(1)  # the threads of a broken connection may abort an orderly exit
"""


class LostLearnerError(Exception):
    """The connection to another learner broke, or a learner ended."""


class LearnerGroup:
    """The executor of rank 0: runs train steps on all learners. The other processes start with the first step."""

    def __init__(self, learner: Learner, cfg: RunConfig, spaces: Spaces, folder: Path) -> None:
        self.learner, self.cfg, self.spaces, self.folder = learner, cfg, spaces, folder
        self.num_learners = cfg.distributed.learners
        self.group: GlooGroup | None = None
        self._processes: list[subprocess.Popen[bytes]] = []
        self._close: list[Callable[[], Any]] = []
        self._in_step = False  # the other learners are in a step and read no message before its end
        self._versions: dict[str, int] = {}  # `Optimizer.version` by name, after the last step

    def run_step(self, method: StepMethod, batch: Batch, options: dict[str, Any]) -> Update:
        """Run a train step on all learners. Means over shards may differ from means over the batch by rounding."""
        learner, shards = self.learner, self._split(batch)
        with self._name_lost_learner():
            if self.group is None:
                self.group = self._start()
            group = self.group
            self._check_alive()  # sending to a process that has ended would block for a long time
            self._in_step = True
            message = self._describe_step(method, options)
            for rank in range(1, self.num_learners):
                group.send(rank, {**message, "shard": _to_portable(shards[rank])})
            group.broadcast_networks(learner)
            with group.averaging(learner):
                update = learner.run_step(method, shards[0], options)
            update = group.combine(update)
        self._in_step = False
        self._versions = {name: optimizer.version for name, optimizer in learner.optimizers().items()}
        return update

    def _split(self, batch: Batch) -> list[Batch]:
        dim, num = self.learner.shard_dim, self.num_learners
        rows = tree_leaves(getattr(batch, batch.fields[0]))[0].shape[dim]
        if rows % num:
            unit, setting = ("rows", "a batch size") if dim == 0 else ("environments", "num_envs")
            raise UserError(f"{num} learners can't split {rows} {unit} equally: set {setting} to a multiple of {num}")
        size = rows // num
        return [batch.map(partial(torch.narrow, dim=dim, start=k * size, length=size)) for k in range(num)]

    def _describe_step(self, method: StepMethod, options: dict[str, Any]) -> dict[str, Any]:
        learner, optimizers = self.learner, self.learner.optimizers()
        changed = [name for name, optimizer in optimizers.items() if self._versions.get(name) != optimizer.version]
        return {
            "method": method.__name__,
            "options": options,
            "updates": learner.updates,
            "tensors": {name: value.cpu() for name, value in vars(learner).items() if type(value) is Tensor},
            "lr": {name: optimizer.lr for name, optimizer in optimizers.items()},
            "optimizers": {name: _to_cpu(optimizers[name].state_dict()) for name in changed},
        }

    def _check_alive(self) -> None:
        if any(process.poll() is not None for process in self._processes):
            raise LostLearnerError("a learner ended")

    @contextlib.contextmanager
    def _name_lost_learner(self) -> Iterator[None]:
        """Turn `LostLearnerError` into a `UserError` that names the learner."""
        try:
            yield
        except LostLearnerError as error:
            until = time.monotonic() + 5.0  # a connection breaks before its process has ended
            while {process.poll() for process in self._processes} == {None} and time.monotonic() < until:
                time.sleep(0.02)
            codes = {k + 1: process.poll() for k, process in enumerate(self._processes)}
            ended = [f"learner {k} with exit code {code}" for k, code in codes.items() if code is not None]
            reason = ", ".join(ended) or str(error)
            raise UserError(
                f"one of the {self.num_learners} learners ended: {reason} (continue with `zhixing resume`)"
            ) from error

    def _start(self) -> GlooGroup:
        """Start the other learners: as local processes, or on the Ray cluster at `distributed.address`.

        The machines of a cluster must share the run's folder.
        """
        cfg, address, num = self.cfg, self.cfg.distributed.address, self.num_learners
        rendezvous = tempfile.mkdtemp(
            prefix="zhixing-learners-", dir=None if address is None else self.folder.resolve()
        )
        self._close.append(lambda: shutil.rmtree(rendezvous, ignore_errors=True))
        settings, device = cfg.model_dump(mode="json"), self.learner.device.type
        objects = portable.pack_settings(settings)
        if address is None:
            for rank in range(1, num):
                self._spawn(rank, num, rendezvous, LOOPBACK, settings, objects, self.spaces, device)
            self._wait_for_learners(rendezvous, self._check_alive)
            return GlooGroup(0, num, rendezvous, LOOPBACK)
        from zhixing.distributed.cluster import Cluster

        cluster = Cluster(address)
        self._close.append(cluster.close)
        remote = cluster.ray.remote(num_cpus=cluster.cpus_per_worker(num - 1))(serve)
        tasks = [
            remote.remote(rank, num, rendezvous, None, settings, objects, self.spaces, device) for rank in range(1, num)
        ]

        def check_tasks() -> None:
            ended, _ = cluster.ray.wait(tasks, timeout=0)
            cluster.ray.get(ended)  # raises the task's error

        self._wait_for_learners(rendezvous, check_tasks)
        return GlooGroup(0, num, rendezvous, cluster.ray.util.get_node_ip_address())

    def _spawn(self, *arguments: Any) -> None:
        """Run `serve` in a new process, which doesn't run the user's script again."""
        process = subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, env=child_environment())
        self._processes.append(process)
        self._close.append(partial(_end, process))
        assert process.stdin is not None
        with (
            contextlib.suppress(BrokenPipeError),
            process.stdin as stdin,
        ):  # `_check_alive` reports a process that ended
            stdin.write(pickle.dumps(arguments))

    def _wait_for_learners(self, rendezvous: str, check: Callable[[], None]) -> None:
        """Wait until all learners are about to join. Joining at once would also wait for learners that have ended."""
        until = time.monotonic() + TIMEOUT.total_seconds()
        while len(list(Path(rendezvous).glob("ready-*"))) < self.num_learners - 1:
            check()
            if time.monotonic() > until:
                raise LostLearnerError("Timed out waiting for learner processes to join.")
            time.sleep(0.02)

    def close(self) -> None:
        group, self.group = self.group, None
        if group is None or self._in_step:
            for process in self._processes:
                process.kill()
        else:
            ended = {k + 1 for k, process in enumerate(self._processes) if process.poll() is not None}
            for rank in set(range(1, self.num_learners)) - ended:
                with contextlib.suppress(LostLearnerError):
                    group.send(rank, None)
        while self._close:
            self._close.pop()()


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(5.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextlib.contextmanager
def _lost_on_error() -> Iterator[None]:
    """Turn errors of gloo, which are plain `RuntimeError`s, into `LostLearnerError`."""
    try:
        yield
    except RuntimeError as error:
        raise LostLearnerError("the connection broke") from error


class GlooGroup:
    """A gloo process group of the learners of a run. It communicates CPU tensors."""

    def __init__(self, rank: int, num_learners: int, rendezvous: str, host: str) -> None:
        torch_distributed: Any = dist  # has no type hints for gloo
        gloo = torch_distributed.ProcessGroupGloo  # not the default group: one process may have several runs
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=host)]
        options._timeout = timedelta(days=365) if rank else TIMEOUT
        store = torch_distributed.FileStore(f"{rendezvous}/rendezvous", num_learners)
        with _lost_on_error():
            self.gloo = gloo(store, rank, num_learners, options)
        self.rank, self.num_learners = rank, num_learners

    def send(self, rank: int, message: Any) -> None:
        data = torch.frombuffer(bytearray(pickle.dumps(message)), dtype=torch.uint8)
        with _lost_on_error():
            self.gloo.send([torch.tensor([len(data)])], rank, 0).wait()
            self.gloo.send([data], rank, 1).wait()

    def receive(self) -> Any:
        """Return a message from rank 0, which is a process of the same run."""
        length = torch.zeros(1, dtype=torch.int64)
        with _lost_on_error():
            self.gloo.recv([length], 0, 0).wait()
            data = torch.empty(int(length), dtype=torch.uint8)
            self.gloo.recv([data], 0, 1).wait()
        return pickle.loads(data.numpy().tobytes())

    def broadcast_networks(self, learner: Learner) -> None:
        """Copy the parameters and buffers of rank 0's networks to all learners."""
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for net in learner.networks().values():
            for tensor in (*net.parameters(), *net.buffers()):
                by_dtype.setdefault(tensor.dtype, []).append(tensor.data)
        for tensors in by_dtype.values():
            flat = torch.cat([tensor.reshape(-1) for tensor in tensors]).cpu()
            with _lost_on_error():
                self.gloo.broadcast([flat], dist.BroadcastOptions()).wait()
            if self.rank:
                _unflatten_into(flat, tensors)

    @contextlib.contextmanager
    def averaging(self, learner: Learner) -> Iterator[None]:
        """Let the optimizers of `learner` average their gradients over all learners."""
        for optimizer in learner.optimizers().values():
            optimizer.average = self.all_reduce_mean
        try:
            yield
        finally:
            for optimizer in learner.optimizers().values():
                optimizer.average = None

    def all_reduce_mean(self, tensors: list[Tensor]) -> None:
        """Replace tensors by their means over all learners, bit-identical on each of them."""
        flat = torch.cat([tensor.detach().reshape(-1).float() for tensor in tensors]).cpu()
        with _lost_on_error():
            self.gloo.allreduce([flat]).wait()
        _unflatten_into(flat.div_(self.num_learners), tensors)

    def combine(self, update: Update) -> Update:
        """Return the mean of the metrics, and the priorities of all shards in the order of the batch."""
        values = [value.detach().clone() for value in update.metrics.values()]
        self.all_reduce_mean(values)
        priority = update.priority
        if priority is not None:
            shard = priority.detach().cpu().contiguous()
            shards = [torch.empty_like(shard) for _ in range(self.num_learners)]
            with _lost_on_error():
                self.gloo.allgather([shards], [shard]).wait()
            priority = torch.cat(shards).to(priority.device)
        return Update(dict(zip(update.metrics, values, strict=True)), priority)


def _unflatten_into(flat: Tensor, tensors: list[Tensor]) -> None:
    for tensor, values in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(values.view(tensor.shape))


def serve(
    rank: int,
    num_learners: int,
    rendezvous: str,
    host: str | None,
    settings: dict[str, Any],
    objects: bytes,
    spaces: Spaces,
    device_type: str,
) -> None:
    """Run the steps of one of the other learners until rank 0 closes the group or ends."""
    from zhixing import algorithms, config

    portable.unpack(objects)
    cfg = config.build([settings], {})
    torch.set_num_threads(int(cfg.num_threads))
    if host is None:
        import ray

        host = ray.util.get_node_ip_address()
    device = torch.device(device_type)
    if device_type != "cpu":
        device = torch.device(device_type, rank % torch.get_device_module(device).device_count())
    learner = algorithms.get(cfg.algorithm).make(cfg, spaces, device)
    Path(rendezvous, f"ready-{rank}").touch()
    with contextlib.suppress(LostLearnerError):  # rank 0 ended and reported the reason
        group = GlooGroup(rank, num_learners, rendezvous, host)
        while (step := group.receive()) is not None:
            _run_shard(learner, group, step, derive_seed(cfg.seed, "learner", rank))


def _run_shard(learner: Learner, group: GlooGroup, step: dict[str, Any], seed: int) -> None:
    optimizers = learner.optimizers()
    for name, state in step["optimizers"].items():
        optimizers[name].load_state_dict(state)
    for name, lr in step["lr"].items():
        optimizers[name].lr = lr
    for name, value in step["tensors"].items():
        setattr(learner, name, value.to(learner.device))
    learner.updates = step["updates"]
    learner.rng.manual_seed(derive_seed(seed, "update", learner.updates))  # differs by rank; equal after a resume
    group.broadcast_networks(learner)
    try:
        with group.averaging(learner):
            method = getattr(type(learner), step["method"]).__wrapped__
            update = learner.run_step(method, Batch(**step["shard"]).to(learner.device), step["options"])
    except RuntimeError as error:  # of this learner, so it must be reported
        raise UserError(f"learner {group.rank} failed: {error}") from error
    group.combine(update)


def _to_portable(batch: Batch) -> dict[str, Any]:
    """Return contiguous CPU tensors: a pickled view would include its whole storage."""
    return {name: tree_map(lambda leaf: leaf.cpu().contiguous(), getattr(batch, name)) for name in batch.fields}


def _to_cpu(state: Any) -> Any:
    """Return a state with its tensors on the CPU: unpickled, others would be on the device of the sender."""
    if isinstance(state, dict):
        return {name: _to_cpu(value) for name, value in state.items()}
    if isinstance(state, list):
        return [_to_cpu(value) for value in state]
    return state.cpu() if isinstance(state, Tensor) else state


def check_learners(cfg: RunConfig, learner: Learner) -> None:
    """Raise `UserError` if the updates of this run can't be split over several learners."""
    from zhixing.core.learner import Learner

    num, reason = cfg.distributed.learners, None
    if cfg.gradients_on_workers:
        reason = "its workers compute the gradients"
    elif cfg.scheme == "play":
        reason = "it makes no updates"
    elif cfg.compile:
        reason = "compile=true makes one graph of gradients and step"
    elif getattr(getattr(cfg, "net", None), "recurrent", "none") != "none":
        reason = "sequences of recurrent networks can't be split"
    elif cfg.precision == "fp16":
        reason = "the loss scale of precision=fp16 is adapted in one place; bf16 needs none"
    elif any(isinstance(part, Learner) for part in vars(learner).values()):
        reason = "it contains another learner"
    elif cfg.scheme == "on_policy" and learner.shard_dim == 1 and cfg.num_envs % num:
        reason = f"num_envs={cfg.num_envs} must be a multiple of the learners"
    for name in ("batch_size", "minibatch_size"):  # sizes of other batches are known at the first update
        size = getattr(cfg, name, 0)
        if size % num:
            reason = f"{name}={size} must be a multiple of the learners"
    rollout, minibatch = getattr(cfg, "rollout_steps", 1) * cfg.num_envs, getattr(cfg, "minibatch_size", 1)
    if rollout > minibatch and rollout % minibatch:  # minibatches, and so their shards, would differ in size
        reason = f"minibatch_size={minibatch} must divide the rollout's {rollout} steps"
    if reason is not None:
        raise UserError(f"distributed.learners={num} doesn't work with this {cfg.algorithm}: {reason}")
