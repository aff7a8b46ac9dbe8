"""A device `npu` without hardware: its memory is host memory, and the CPU's kernels do its arithmetic.

Tensors of the device have its type, their own storage and their own dispatch key, so torch rejects operations that mix
them with tensors on the CPU, and code that asks for the type of the device takes the branches for accelerators.

Importing this module registers the device with torch for the rest of the process. Do it before the first backward pass:
torch then starts its threads, one per device.
"""

from __future__ import annotations

import ctypes
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend
from torch.utils.dlpack import from_dlpack, to_dlpack

CPU, NPU = 1, 12  # device types of DLPack; the second is torch's for devices of other packages
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


class FakeModule(_DummyBackendModule):
    """`torch.npu`."""

    num_synchronized = 0

    def synchronize(self, device: Any = None) -> None:
        FakeModule.num_synchronized += 1

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def is_autocast_enabled(self) -> bool:
        return torch.is_autocast_enabled("npu")


class FakeGenerator(torch.Generator):
    """Random numbers for tensors of the device, from a generator of the CPU."""

    def __new__(cls, device: Any = "cpu") -> Any:
        if torch.device(device).type != "npu":
            return _generator(device)
        return super().__new__(cls, "cpu")

    def __init__(self, device: Any = "cpu") -> None: ...

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("npu", 0)


_generator = torch.Generator
_setup_privateuseone_for_python_backend("npu", FakeModule())
torch.Generator = FakeGenerator  # type: ignore[misc]


def move(tensor: torch.Tensor, device: int) -> torch.Tensor:
    """Return a tensor of another device type in the same memory."""
    capsule = to_dlpack(tensor.detach())
    # a DLTensor begins with the pointer to the data and the type of the device
    ctypes.c_int32.from_address(_pointer(capsule, b"dltensor") + 8).value = device
    return from_dlpack(capsule)


def on_cpu(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operation of the device with the kernel of the CPU."""
    originals: dict[int, torch.Tensor] = {}

    def to_cpu(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.device.type == "npu":
            # an empty tensor may be an output, which the operation resizes
            alias = move(leaf, CPU) if leaf.numel() else torch.empty(leaf.shape, dtype=leaf.dtype)
            originals[id(alias)] = leaf
            aliases.append(alias)  # keeps its id
            return alias
        return torch.device("cpu") if isinstance(leaf, torch.device) and leaf.type == "npu" else leaf

    aliases: list[torch.Tensor] = []
    args, kwargs = pytree.tree_map(to_cpu, (args, kwargs))
    result = op(*args, **kwargs)

    def to_npu(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        original = originals.get(id(leaf))
        if original is None:
            return move(leaf, NPU)
        if original.shape != leaf.shape:
            moved = move(leaf, NPU)
            original.set_(moved.untyped_storage(), 0, moved.shape, moved.stride())
        return original

    return pytree.tree_map(to_npu, result)


def copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    source, memory = (move(t, CPU) if t.device.type == "npu" else t for t in (source, target))
    memory.copy_(source)
    return target


def convolution_backward(gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *settings: Any) -> Any:
    bias_sizes = [weight.shape[0]]
    return on_cpu(torch.ops.aten.convolution_backward.default, gradient, x, weight, bias_sizes, *settings)


def view(op: Any) -> Any:
    """Return a kernel that makes a view with the kernel of the CPU, which only reads sizes: the storage is shared."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    return lambda *args, **kwargs: op.redispatch(keys, *args, **kwargs)


_kernels, _fallback = torch.library.Library("aten", "IMPL"), torch.library.Library("_", "IMPL")
_fallback.fallback(on_cpu, "PrivateUse1")
_fallback.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")  # autocast casts nothing
_kernels.impl("mse_loss", partial(on_cpu, torch.ops.aten.mse_loss.default), "PrivateUse1")  # torch's resizes its output
_kernels.impl("convolution_overrideable", partial(on_cpu, torch.ops.aten.convolution.default), "PrivateUse1")
_kernels.impl("convolution_backward_overrideable", convolution_backward, "PrivateUse1")
_kernels.impl("_copy_from", copy_from, "PrivateUse1")
for _name in ("as_strided.default", "view.default", "_reshape_alias.default", "set_.source_Storage_storage_offset"):
    _packet, _, _overload = _name.partition(".")
    _kernels.impl(
        _name.removesuffix(".default"), view(getattr(getattr(torch.ops.aten, _packet), _overload)), "PrivateUse1"
    )
