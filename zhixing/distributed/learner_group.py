"""Several learners: each takes the gradients of its share of a (mini)batch, one moves the weights along their mean.

The run's own learner is the first. The others are processes that get its weights and a share, and give gradients back;
they keep nothing, so whatever an algorithm does with its weights between two steps, all compute with the same ones.
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
from zhixing.core.seeding import derive_seed
from zhixing.core.spaces import Spaces
from zhixing.core.tree import tree_leaves, tree_map
from zhixing.envs import portable
from zhixing.errors import UserError
from zhixing.utils.importing import child_environment

if TYPE_CHECKING:
    from zhixing.config import RunConfig
    from zhixing.core.learner import Gradients, Learner, Update

LOOPBACK = "127.0.0.1"
TIMEOUT = timedelta(minutes=10)  # that the first waits for others; these wait for as long as it acts and evaluates
# Ctrl-C, or the end of a whole group of processes, is the first's business: it saves a checkpoint and tells the others
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


class LearnerGroup:
    """The other learners, as the first sees them. They are started when the first step is asked for."""

    def __init__(self, learner: Learner, cfg: RunConfig, spaces: Spaces, folder: Path) -> None:
        self.learner, self.cfg, self.spaces, self.folder = learner, cfg, spaces, folder
        self.num = cfg.distributed.learners
        self.group: Group | None = None
        self._processes: list[subprocess.Popen[bytes]] = []
        self._close: list[Callable[[], Any]] = []
        self._under_way = False  # others are at a step, and hear nothing before its end

    def step(self, find: Callable[..., Gradients], batch: Batch, **parts: Any) -> Update:
        """What `learner.apply(find(batch, **parts))` does, up to how means of shares differ from those of the whole."""
        learner, dim = self.learner, self.learner.shard_dim
        rows = tree_leaves(getattr(batch, batch.fields[0]))[0].shape[dim]
        if rows % self.num:
            what = ("rows", "a batch size") if dim == 0 else ("environments", "a num_envs")
            raise UserError(f"{self.num} learners can't share {rows} {what[0]} equally: set {what[1]} that they divide")
        if self.group is None:
            with self._together():
                self.group = self._start()
        share = rows // self.num
        shares = [batch.map(partial(torch.narrow, dim=dim, start=k * share, length=share)) for k in range(self.num)]
        tensors = {name: value.cpu() for name, value in vars(learner).items() if type(value) is Tensor}
        work = {"find": find.__name__, "parts": parts, "updates": learner.updates, "tensors": tensors}
        with self._together():
            self._check_alive()  # to send something to one that is gone would wait for long
            self._under_way = True
            for k in range(1, self.num):
                self.group.send(k, {**work, "share": _fields(shares[k])})
            self.group.share_weights(learner)
        own = learner.found(find, shares[0], **parts)
        with self._together():
            mean = self.group.mean(own)
        self._under_way = False
        return learner.apply(mean)

    def _check_alive(self) -> None:
        if any(process.poll() is not None for process in self._processes):
            raise RuntimeError("gone")

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        """Around what fails when another is gone."""
        try:
            yield
        except RuntimeError as error:
            until = time.monotonic() + 5.0  # a broken connection is heard of before the end of the process
            while {process.poll() for process in self._processes} == {None} and time.monotonic() < until:
                time.sleep(0.02)
            ended = {k + 1: process.poll() for k, process in enumerate(self._processes)}
            codes = [f"learner {k} with exit code {code}" for k, code in ended.items() if code is not None]
            told = ", ".join(codes) or "the connection broke"
            raise UserError(f"one of the {self.num} learners ended: {told} (`zhixing resume` goes on)") from error

    def _start(self) -> Group:
        """On this machine as processes, reachable from it alone; with an address on that Ray cluster, whose machines
        must see the run's folder."""
        cfg, address = self.cfg, self.cfg.distributed.address
        rendezvous = tempfile.mkdtemp(
            prefix="zhixing-learners-", dir=None if address is None else self.folder.resolve()
        )
        self._close.append(lambda: shutil.rmtree(rendezvous, ignore_errors=True))
        settings, device = cfg.model_dump(mode="json"), self.learner.device.type
        packed = portable.pack_settings(settings)
        if address is None:
            for rank in range(1, self.num):
                self._spawn(rank, self.num, rendezvous, LOOPBACK, settings, packed, self.spaces, device)
            self._meet(rendezvous, self._check_alive)
            return Group(0, self.num, rendezvous, LOOPBACK)
        from zhixing.distributed.cluster import Cluster

        cluster = Cluster(address)
        self._close.append(cluster.close)
        remote = cluster.ray.remote(num_cpus=cluster.cpus(self.num - 1))(serve)
        others = range(1, self.num)
        tasks = [remote.remote(k, self.num, rendezvous, None, settings, packed, self.spaces, device) for k in others]

        def check() -> None:
            ended, _ = cluster.ray.wait(tasks, timeout=0)
            cluster.ray.get(ended)  # raises what it failed of

        self._meet(rendezvous, check)
        return Group(0, self.num, rendezvous, cluster.ray.util.get_node_ip_address())

    def _spawn(self, *arguments: Any) -> None:
        """`serve` in a process of its own, which doesn't run the user's script again."""
        process = subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, env=child_environment())
        self._processes.append(process)
        self._close.append(partial(_end, process))
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin as stdin:  # if it is gone, its exit code tells
            stdin.write(pickle.dumps(arguments))

    def _meet(self, rendezvous: str, check: Callable[[], None]) -> None:
        """Wait until all others are about to join the group, which in itself would wait for those that are gone."""
        until = time.monotonic() + TIMEOUT.total_seconds()
        while len(list(Path(rendezvous).glob("ready-*"))) < self.num - 1:
            check()
            if time.monotonic() > until:
                raise RuntimeError("some didn't come")
            time.sleep(0.02)

    def close(self) -> None:
        group, self.group = self.group, None
        if group is None or self._under_way:
            for process in self._processes:
                process.kill()
        else:
            gone = [k + 1 for k, process in enumerate(self._processes) if process.poll() is not None]
            for k in set(range(1, self.num)) - set(gone):
                with contextlib.suppress(RuntimeError):
                    group.send(k, None)
        while self._close:
            self._close.pop()()


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(5.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class Group:
    """All learners of a run: what goes between them."""

    def __init__(self, rank: int, num: int, rendezvous: str, host: str) -> None:
        torch_distributed: Any = dist  # most of what is used here has no types
        gloo = torch_distributed.ProcessGroupGloo  # a group of its own: a process may hold several runs
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=host)]
        options._timeout = timedelta(days=365) if rank else TIMEOUT
        self.group = gloo(torch_distributed.FileStore(f"{rendezvous}/rendezvous", num), rank, num, options)
        self.rank, self.num = rank, num

    def send(self, to: int, message: Any) -> None:
        data = torch.frombuffer(bytearray(pickle.dumps(message)), dtype=torch.uint8)
        self.group.send([torch.tensor([len(data)])], to, 0).wait()
        self.group.send([data], to, 1).wait()

    def receive(self) -> Any:
        """From the first learner, a process of the same run."""
        length = torch.zeros(1, dtype=torch.int64)
        self.group.recv([length], 0, 0).wait()
        data = torch.empty(int(length), dtype=torch.uint8)
        self.group.recv([data], 0, 1).wait()
        return pickle.loads(data.numpy().tobytes())

    def share_weights(self, learner: Learner) -> None:
        """Those of the first become everybody's: of all networks, with their statistics."""
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for net in learner.networks().values():
            for tensor in (*net.parameters(), *net.buffers()):
                by_type.setdefault(tensor.dtype, []).append(tensor.data)
        for tensors in by_type.values():
            flat = torch.cat([tensor.reshape(-1) for tensor in tensors]).cpu()
            self.group.broadcast([flat], dist.BroadcastOptions()).wait()
            if self.rank:
                for tensor, values in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
                    tensor.copy_(values.view(tensor.shape))

    def mean(self, own: Gradients) -> Gradients:
        """Over all learners, for the first; priorities one share after the other."""
        parts = [part for parts in own.by_optimizer.values() for part in parts]
        told = list(own.metrics.values())
        numbers = [*parts, *told]
        flat = torch.cat([number.detach().reshape(-1).float() for number in numbers]).cpu()
        self.group.reduce(flat, 0, dist.ReduceOp.SUM).wait()
        priority = own.priority
        if priority is not None:
            mine = priority.detach().cpu().contiguous()
            all_of_them = [torch.empty_like(mine) for _ in range(self.num)]
            self.group.allgather([all_of_them], [mine]).wait()
            priority = torch.cat(all_of_them).to(priority.device)
        flat /= self.num
        for number, values in zip(numbers, flat.split([n.numel() for n in numbers]), strict=True):
            number.data.copy_(values.view(number.shape))  # where the optimizer looks for what isn't finite
        return own._replace(priority=priority)


def serve(
    rank: int,
    num: int,
    rendezvous: str,
    host: str | None,
    settings: dict[str, Any],
    packed: bytes,
    spaces: Spaces,
    kind: str,
) -> None:
    """One of the others, until the first has no more to do or is gone."""
    from zhixing import algorithms, config

    portable.unpack(packed)
    cfg = config.build([settings], {})
    torch.set_num_threads(int(cfg.num_threads))
    if host is None:
        import ray

        host = ray.util.get_node_ip_address()
    device = torch.device("cuda", rank % torch.cuda.device_count()) if kind == "cuda" else torch.device(kind)
    learner = algorithms.get(cfg.algorithm).make(cfg, spaces, device)
    Path(rendezvous, f"ready-{rank}").touch()
    group = Group(rank, num, rendezvous, host)
    with contextlib.suppress(RuntimeError):  # the first is gone, and has told why
        while (work := group.receive()) is not None:
            learner.updates = work["updates"]
            for name, value in work["tensors"].items():
                setattr(learner, name, value.to(device))
            # noise of its own, the same after a resume
            learner.rng.manual_seed(derive_seed(derive_seed(cfg.seed, "learner", rank), "update", learner.updates))
            group.share_weights(learner)
            find = getattr(learner, work["find"])
            try:
                own = learner.found(find, Batch(**work["share"]).to(device), **work["parts"])
            except RuntimeError as error:  # not of the connection: it must be told
                raise UserError(f"learner {rank} failed: {error}") from error
            group.mean(own)


def _fields(batch: Batch) -> dict[str, Any]:
    """As they travel: without what they are views of."""
    return {name: tree_map(lambda leaf: leaf.cpu().contiguous(), getattr(batch, name)) for name in batch.fields}


def check_learners(cfg: RunConfig, learner: Learner) -> None:
    """Refuse what several learners can't share."""
    from zhixing.core.learner import Learner

    reason = None
    if learner.gradients_on_workers:
        reason = "its workers take gradients already"
    elif cfg.scheme == "play":
        reason = "it learns nothing"
    elif cfg.compile:
        reason = "compile=true makes one graph of gradients and step"
    elif getattr(getattr(cfg, "net", None), "recurrent", "none") != "none":
        reason = "sequences of recurrent networks aren't shared"
    elif cfg.precision == "fp16":
        reason = "precision=fp16 scales losses in one place; bf16 needs no scale"
    elif any(isinstance(part, Learner) for part in vars(learner).values()):
        reason = "it is made of several learners itself"
    elif cfg.scheme == "on_policy" and learner.shard_dim == 1 and cfg.num_envs % cfg.distributed.learners:
        reason = f"num_envs={cfg.num_envs} must be a multiple of the learners"
    for name in ("batch_size", "minibatch_size"):  # others are known at the first update
        size = getattr(cfg, name, 0)
        if size % cfg.distributed.learners:
            reason = f"{name}={size} must be a multiple of the learners"
    rollout, minibatch = getattr(cfg, "rollout_steps", 1) * cfg.num_envs, getattr(cfg, "minibatch_size", 1)
    if rollout > minibatch and rollout % minibatch:  # minibatches differ by a step then, and so would the shares
        reason = f"minibatch_size={minibatch} must divide the rollout's {rollout} steps"
    if reason is not None:
        raise UserError(f"distributed.learners={cfg.distributed.learners} isn't for this {cfg.algorithm}: {reason}")
