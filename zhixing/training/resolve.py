"""Decisions made once before a run starts: its folder, its device, and all settings that are `auto`."""

from __future__ import annotations

import importlib
import itertools
import math
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from zhixing.config import (
    BUILT_IN_NETS,
    AsynchronousConfig,
    OffPolicyConfig,
    OnPolicyConfig,
    RunConfig,
    parse_interval,
)
from zhixing.core.spaces import Spaces
from zhixing.core.tree import tree_leaves, tree_map
from zhixing.envs import VectorEnv
from zhixing.envs.adapters.gymnasium_ids import registering_module
from zhixing.errors import UserError
from zhixing.utils import importing
from zhixing.utils.cpus import cpu_count

ACCELERATORS = ("cuda", "npu", "mps")  # in the order in which device=auto tries them
NO_ENV = "none"  # --env none: train on a dataset without evaluations


def default_out(cfg: RunConfig) -> Path:
    """Create a new folder for a run. Runs that start in the same second get different folders."""
    names = [
        Path(name).name if importing.FILE_PATTERN.fullmatch(name) else name for name in (cfg.env.name, cfg.algorithm)
    ]
    env, algorithm = (re.sub(r"[^\w.-]+", "-", name)[-60:] for name in names)
    out = Path("runs") / f"{algorithm}-{env}-{cfg.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    for folder in itertools.chain([out], (out.with_name(f"{out.name}-{i}") for i in itertools.count(2))):
        with suppress(FileExistsError):
            folder.mkdir(parents=True)
            break
    return folder


def resolve(cfg: RunConfig, spaces: Spaces, env: VectorEnv | None) -> RunConfig:
    """Replace `auto` by the values that are used, so the configuration in the run's folder is what ran."""
    vector, threads = cfg.vector, cfg.num_threads
    if is_distributed(cfg):
        if vector.backend == "auto":
            # workers already run in parallel, so each steps its environments within its process
            isolated = vector.isolated or (isinstance(vector.workers, int) and vector.workers > 1)
            only = env is not None and env.backend in ("native", "torch")  # the only one that steps these environments
            backend = env.backend if only and env is not None else "process" if isolated else "serial"
            vector = vector.model_copy(update={"backend": backend})
    elif env is not None:
        vector = vector.model_copy(update={"backend": env.backend, "workers": env.workers})
    if threads == "auto":
        # small matrices are slower on several threads; convolutions are faster
        sizes = tree_leaves(tree_map(lambda f: math.prod(f.shape) if len(f.shape) == 3 else 0, spaces.fields()["obs"]))
        threads = cpu_count() if max(sizes) >= 32 * 32 else 1
    imports, module = cfg.imports, registering_module(cfg.env.name)
    if module is not None and module.partition(".")[0] not in [package.partition(".")[0] for package in imports]:
        imports = [*imports, module]
    resolved: dict[str, Any] = {"vector": vector, "num_threads": threads, "imports": imports}
    if getattr(cfg, "normalize_obs", None) == "auto":
        resolved["normalize_obs"] = cfg.net.kind in BUILT_IN_NETS  # type: ignore[attr-defined]
    return resolve_device(cfg).model_copy(update=resolved)


def resolve_device(cfg: RunConfig) -> RunConfig:
    """Replace `device=auto` and `device=gpu`; raise `UserError` if torch can't use the device."""
    kind, _, index = cfg.device.partition(":")
    if kind in ("auto", "gpu"):
        found = next((name for name in ACCELERATORS if _is_available(name)), None)
        if found is None and kind == "gpu":
            raise UserError(
                f"device={cfg.device!r} can't be used here: torch finds no {', '.join(ACCELERATORS)} (try device=cpu)"
            )
        device = "cpu" if found is None else f"{found}:{index}" if index else found
        return cfg.model_copy(update={"device": device})
    if kind == "npu":
        _register_npu()
    try:
        torch.zeros(1, device=cfg.device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).split("\n")[0]
        raise UserError(f"device={cfg.device!r} can't be used here: {reason} (try device=cpu)") from None
    return cfg


def _is_available(name: str) -> bool:
    if name == "npu":
        _register_npu()
    module = getattr(torch, name, None)  # torch.npu exists only if a package registers it
    return module is not None and bool(module.is_available())


def _register_npu() -> None:
    with suppress(ImportError):
        importlib.import_module("torch_npu")


def is_distributed(cfg: RunConfig) -> bool:
    """Return whether a run collects with workers; raise `UserError` for settings that don't work with them."""
    ray_workers = cfg.distributed.workers
    workers, setting = ray_workers, "distributed.workers"
    if isinstance(cfg, AsynchronousConfig) and not ray_workers:
        workers, setting = cfg.actors, "actors"
    if ray_workers and not isinstance(cfg, (OnPolicyConfig, OffPolicyConfig)):
        raise UserError(
            f"{cfg.algorithm} collects in one process and doesn't support distributed.workers={ray_workers}; set "
            f"distributed.workers=0"
        )
    if workers > cfg.num_envs:
        raise UserError(
            f"{setting}={workers} is more than num_envs={cfg.num_envs}, but each needs an environment; lower {setting} "
            f"or raise num_envs"
        )
    if ray_workers and isinstance(cfg, OffPolicyConfig) and cfg.async_collect:
        raise UserError(
            "async_collect=true can't be combined with distributed.workers, which collect while the learner updates "
            "anyway; set async_collect=false"
        )
    if isinstance(cfg, OffPolicyConfig) and (cfg.async_collect or ray_workers):
        _check_train_every(cfg)
    if ray_workers and cfg.vector.backend == "ray":
        raise UserError(
            "vector.backend=ray can't be combined with distributed.workers, which run on Ray themselves; set "
            "vector.backend=auto"
        )
    uses_ray = ray_workers or cfg.distributed.learners > 1 or cfg.vector.backend == "ray"
    if cfg.distributed.address is not None and not uses_ray:
        raise UserError(
            f"distributed.address={cfg.distributed.address!r} has no effect without Ray: set distributed.workers, "
            f"distributed.learners or vector.backend=ray, or leave the address out"
        )
    return workers > 0


def _check_train_every(cfg: OffPolicyConfig) -> None:
    if parse_interval(cfg.train_every).unit == "episodes":
        concurrent = "async_collect" if cfg.async_collect else "distributed.workers"
        raise UserError(
            f"train_every={cfg.train_every!r} can't be combined with {concurrent}, which collects while the learner "
            f"updates; set train_every to a number of steps"
        )
