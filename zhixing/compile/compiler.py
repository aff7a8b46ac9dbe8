"""Compiles a graph of tensor operations with torch's Inductor, and caches the result on disk.

On the CPU a graph becomes one shared library, named by a hash of everything it was made of. The next start loads it
in milliseconds, without running either compiler.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, fx

from zhixing.errors import UserError

Run = Callable[[list[Tensor]], list[Tensor]]


def cache_folder() -> Path:
    """Return the folder of compiled graphs: in ZHIXING_CACHE_DIR, or in the user's cache folder."""
    base = os.environ.get("ZHIXING_CACHE_DIR")
    if base:
        return Path(base) / "graphs"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zhixing" / "graphs"


def check_compiler() -> None:
    """Raise `UserError` if there is no C++ compiler, which graphs for the CPU need."""
    cxx = os.environ.get("CXX")
    names = [cxx] if cxx else ["g++", "clang++", "cl"]
    if not any(shutil.which(name) for name in names):
        raise UserError(
            f"compile=true needs a C++ compiler, but {' or '.join(names)} isn't installed: install one (apt install "
            f"g++, or xcode-select --install), set CXX to yours, or set compile=false"
        )


def compile_graph(module: fx.GraphModule, examples: list[Tensor]) -> Run:
    """Return a function that runs the graph on inputs of the examples' shapes."""
    if any(example.device.type != "cpu" for example in examples):
        return _compile_for_device(module, examples)
    file = cache_folder() / f"{_cache_key(module, examples)}.so"
    if not file.exists():
        _compile(module, examples, file)
    return torch._C._aoti.AOTIModelContainerRunnerCpu(str(file), 1).run


def _compile(module: fx.GraphModule, examples: list[Tensor], file: Path) -> None:
    check_compiler()
    file.parent.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(file.parent / "inductor"))
    import torch._inductor  # takes seconds, which cached graphs save

    # under a temporary name until it is complete: other processes may look for it
    with tempfile.TemporaryDirectory(dir=file.parent) as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = {"aot_inductor.output_path": f"{folder}/graph.so"}
        library = torch._inductor.aot_compile(module, tuple(examples), options=options)
        os.replace(str(library), file)


def _cache_key(module: fx.GraphModule, examples: list[Tensor]) -> str:
    """Return a hash of the graph, its inputs and the kind of machine."""
    inputs = [f"{e.dtype} {list(e.shape)} {list(e.stride())}" for e in examples]
    platform_info = [
        torch.__version__,
        torch.backends.cpu.get_cpu_capability(),
        platform.machine(),
        torch.get_num_threads(),
    ]
    text = "\n".join([module.code, *inputs, *map(str, platform_info)])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _compile_for_device(module: fx.GraphModule, examples: list[Tensor]) -> Run:
    """Compile for a device other than the CPU, with Inductor's own cache, as a CUDA graph."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "inductor"))
    import torch._inductor

    run = torch._inductor.compile(module, [*examples], options={"triton.cudagraphs": True})
    return lambda inputs: list(run(*inputs))
