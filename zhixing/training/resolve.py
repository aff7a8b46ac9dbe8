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

from zhixing.config import AsynchronousConfig, OffPolicyConfig, OnPolicyConfig, RunConfig
from zhixing.core.spaces import Spaces
from zhixing.core.tree import tree_leaves, tree_map
from zhixing.envs import VectorEnv
from zhixing.envs.adapters.gymnasium_ids import registering_module
from zhixing.errors import UserError
from zhixing.utils import importing
from zhixing.utils.cpus import cpu_count


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
            # workers run at the same time already, so each steps its environments in its own process
            isolated = vector.isolated or (isinstance(vector.workers, int) and vector.workers > 1)
            vector = vector.model_copy(update={"backend": "process" if isolated else "serial"})
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
        resolved["normalize_obs"] = cfg.net.kind == "auto"  # type: ignore[attr-defined]
    return resolve_device(cfg).model_copy(update=resolved)


def resolve_device(cfg: RunConfig) -> RunConfig:
    """Replace `device=auto`; raise `UserError` if torch can't use the device."""
    if cfg.device == "auto":
        return cfg.model_copy(update={"device": "cuda" if torch.cuda.is_available() else "cpu"})
    if cfg.device.startswith("npu"):
        with suppress(ImportError):
            importlib.import_module("torch_npu")  # registers the device with torch
    try:
        torch.zeros(1, device=cfg.device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).split("\n")[0]
        raise UserError(f"device={cfg.device!r} can't be used here: {reason} (try device=cpu)") from None
    return cfg


def is_distributed(cfg: RunConfig) -> bool:
    """Return whether a run collects with workers; raise `UserError` for settings that don't work with them."""
    asked = cfg.distributed.workers
    where = "actors" if isinstance(cfg, AsynchronousConfig) and not asked else "distributed.workers"
    workers = asked or (cfg.actors if isinstance(cfg, AsynchronousConfig) else 0)
    if asked and not isinstance(cfg, (OnPolicyConfig, OffPolicyConfig)):
        raise UserError(f"{cfg.algorithm} acts in one process; distributed.workers is for those that learn from steps")
    if workers > cfg.num_envs:
        raise UserError(f"{where}={workers} must be at most the {cfg.num_envs} environments that they share (num_envs)")
    if asked and isinstance(cfg, OffPolicyConfig) and cfg.async_collect:
        raise UserError("async_collect=true goes without distributed.workers, which act while the driver learns anyway")
    if asked and cfg.vector.backend == "ray":
        raise UserError("vector.backend=ray goes without distributed.workers, which are on Ray themselves")
    on_ray = asked or cfg.distributed.learners > 1 or cfg.vector.backend == "ray"
    if cfg.distributed.address is not None and not on_ray:
        raise UserError(
            "distributed.address is for distributed.workers or learners, or for vector.backend=ray; set one of them"
        )
    return workers > 0
