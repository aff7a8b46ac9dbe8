"""From a graph of tensor operations to machine code, by torch's inductor, kept on disk.

On the CPU a graph becomes one shared library, named by everything that it was made of. A second start finds it there
and loads it in milliseconds, without the compiler of torch or that of the machine.
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
    """Where compiled graphs are kept: in ZHIXING_CACHE_DIR, or where the system keeps such things."""
    base = os.environ.get("ZHIXING_CACHE_DIR")
    if base:
        return Path(base) / "graphs"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zhixing" / "graphs"


def check_compiler() -> None:
    """Before anything runs: graphs for the CPU are compiled with the machine's own C++ compiler."""
    guards = os.environ.get("CXX")
    names = [guards] if guards else ["g++", "clang++", "cl"]
    if not any(shutil.which(name) for name in names):
        raise UserError(
            f"compile=true needs a C++ compiler, and there is no {' or '.join(names)}: install one (apt install g++, "
            f"or xcode-select --install), name yours in CXX, or set compile=false"
        )


def compiled(module: fx.GraphModule, examples: list[Tensor]) -> Run:
    """A function of the graph's inputs that does what the graph does. Inputs must have the examples' shapes."""
    if any(example.device.type != "cpu" for example in examples):
        return _compiled_for_device(module, examples)
    file = cache_folder() / f"{_name(module, examples)}.so"
    if not file.exists():
        _compile(module, examples, file)
    return torch._C._aoti.AOTIModelContainerRunnerCpu(str(file), 1).run


def _compile(module: fx.GraphModule, examples: list[Tensor], file: Path) -> None:
    check_compiler()
    file.parent.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(file.parent / "inductor"))
    import torch._inductor  # seconds, which those who find the library needn't wait for

    # under another name until it is whole: others may be looking for it
    with tempfile.TemporaryDirectory(dir=file.parent) as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = {"aot_inductor.output_path": f"{folder}/graph.so"}
        made = torch._inductor.aot_compile(module, tuple(examples), options=options)
        os.replace(str(made), file)


def _name(module: fx.GraphModule, examples: list[Tensor]) -> str:
    """The same for the same work on the same kind of machine."""
    inputs = [f"{e.dtype} {list(e.shape)} {list(e.stride())}" for e in examples]
    around = [torch.__version__, torch.backends.cpu.get_cpu_capability(), platform.machine(), torch.get_num_threads()]
    words = "\n".join([module.code, *inputs, *map(str, around)])
    return hashlib.sha256(words.encode()).hexdigest()[:32]


def _compiled_for_device(module: fx.GraphModule, examples: list[Tensor]) -> Run:
    """Elsewhere inductor keeps its own cache, and what it made is replayed as a CUDA graph."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "inductor"))
    import torch._inductor

    run = torch._inductor.compile(module, [*examples], options={"triton.cudagraphs": True})
    return lambda inputs: list(run(*inputs))
