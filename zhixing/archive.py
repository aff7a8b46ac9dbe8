"""Reading what `torch.save` wrote without believing it: nothing in the file is executed, and it takes no more memory
than the file is large.

`torch.load(weights_only=True)` executes nothing either. But it unpacks what is compressed, makes arrays of any size
that a file asks for, and reads older formats that do the same: a file of a kilobyte may ask for all memory. Here only
what our own writer writes is known, and each part is held against the bytes that are really there.
"""

from __future__ import annotations

import math
import pickletools
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from zhixing.tree import check_size

SMALL = 65_536  # numbers of a tensor that may be more than its storage holds: one value that stands for many
STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
# kinds without a class of their own, such as torch.uint16, are stored as bytes and tell their type beside them
TYPES = {
    str(kind).removeprefix("torch."): kind for kind in (*STORAGES.values(), torch.uint16, torch.uint32, torch.uint64)
}


VALUES = ("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT", "BINUNICODE")
NEW: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_TUPLE": tuple,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
}
T = TypeVar("T")


class ArchiveError(ValueError):
    """The file is none that our writer wrote."""


class Kind(NamedTuple):
    """What stands in a pickle for the type of a storage."""

    dtype: torch.dtype


class Storage(NamedTuple):
    content: Tensor  # its bytes, of which all tensors in it are views, as they were when it was written
    dtype: torch.dtype


class Maker(NamedTuple):
    """What stands in a pickle for a function, so that nothing in it reaches the function itself."""

    make: Callable[..., Any]


def read_archive(path: Path) -> Any:
    """The tree of plain values and tensors in a file that `torch.save` wrote."""
    with path.open("rb") as file:
        if file.read(4) != b"PK\3\4":
            raise ArchiveError("it is no archive of tensors")
        size = file.seek(0, 2)
        with zipfile.ZipFile(file) as archive:
            parts = {info.filename.partition("/")[2]: info for info in archive.infolist()}
            if len(parts) != len(archive.infolist()) or any(info.compress_type for info in parts.values()):
                raise ArchiveError("its parts are compressed, or there twice")
            if sum(info.file_size for info in parts.values()) > size:
                raise ArchiveError("its parts are larger than the file")
            if "byteorder" in parts and archive.read(parts["byteorder"]) != sys.byteorder.encode():
                raise ArchiveError("it was written on a machine with another order of bytes")
            text = archive.read(parts["data.pkl"])  # a sum is checked: of a flipped bit is told, too
            tree = _unpickled(text, lambda key: bytearray(archive.read(parts[f"data/{key}"])))
    check_size(tree, len(text))
    return tree


def _unpickled(text: bytes, record: Callable[[str], bytearray]) -> Any:
    """The tree that a pickle describes, by the few operations of which `torch.save` makes one."""
    stack: list[Any] = []
    marks: list[int] = []  # where on the stack the parts of something larger begin
    memo: dict[int, Any] = {}
    storages: dict[str, Tensor] = {}

    def since_mark() -> list[Any]:
        at = marks.pop()
        parts = stack[at:]
        del stack[at:]
        return parts

    for operation, argument, _ in pickletools.genops(text):
        name, value = operation.name, cast("Any", argument)  # a number or text, as the operation says
        if name in ("PROTO", "STOP"):
            continue
        if name in VALUES:
            stack.append(value)
        elif name in NEW:
            stack.append(NEW[name]())
        elif name == "MARK":
            marks.append(len(stack))
        elif name in ("BINPUT", "LONG_BINPUT"):
            memo[value] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[value])
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            stack[-int(name[-1]) :] = [tuple(stack[-int(name[-1]) :])]
        elif name == "TUPLE":
            stack.append(tuple(since_mark()))
        elif name in ("APPEND", "APPENDS"):
            parts = [stack.pop()] if name == "APPEND" else since_mark()
            _is(stack[-1], list).extend(parts)
        elif name in ("SETITEM", "SETITEMS"):
            parts = [stack.pop(-2), stack.pop()] if name == "SETITEM" else since_mark()
            _is(stack[-1], dict).update(zip(parts[::2], parts[1::2], strict=True))
        elif name == "GLOBAL":
            stack.append(_named(value))
        elif name == "REDUCE":
            parts = stack.pop()
            stack.append(_is(stack.pop(), Maker).make(*_is(parts, tuple)))
        elif name == "BINPERSID":
            stack.append(_storage(stack.pop(), storages, record))
        else:
            raise ArchiveError(f"it holds {name}, which no checkpoint needs")
    (tree,) = stack
    return tree


def _is(value: Any, kind: type[T]) -> T:
    if type(value) is not kind:
        raise ArchiveError("it is put together wrongly")
    return value


def _named(words: str) -> Any:
    """What stands for a function or a type that the pickle names: of all that there are, these few."""
    module, _, name = words.partition(" ")
    if module == "torch" and name in STORAGES:
        return Kind(STORAGES[name])
    if module == "torch" and name in TYPES:
        return TYPES[name]
    if words == "torch.storage UntypedStorage":
        return Kind(torch.uint8)
    if words in MAKERS:
        return Maker(MAKERS[words])
    raise ArchiveError(f"it names {module}.{name}, which no checkpoint holds")


def _storage(told: Any, known: dict[str, Tensor], record: Callable[[str], bytearray]) -> Storage:
    tag, kind, key, _, numel = told
    if tag != "storage" or type(numel) is not int:
        raise ArchiveError("it holds something that is no tensor")
    if _is(key, str) not in known:
        content = record(key)
        known[key] = torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
    if len(known[key]) != numel * _is(kind, Kind).dtype.itemsize:
        raise ArchiveError("a tensor is smaller or larger than it says")
    return Storage(known[key], kind.dtype)


def _tensor(storage: Storage, offset: int, shape: Any, stride: Any, *_: Any) -> Tensor:
    return _view(storage.content, storage.dtype, offset, shape, stride)


def _typed(
    storage: Storage, offset: int, shape: Any, stride: Any, grad: Any, hooks: Any, dtype: Any, *_: Any
) -> Tensor:
    return _view(storage.content, dtype, offset, shape, stride)


def _view(content: Tensor, dtype: torch.dtype, offset: int, shape: Any, stride: Any) -> Tensor:
    numbers = (offset, *shape, *stride)
    if len(shape) != len(stride) or not all(type(n) is int and 0 <= n < 2**62 for n in numbers):
        raise ArchiveError("a tensor has no shape")
    room = len(content) // dtype.itemsize
    count = math.prod(shape)
    last = offset + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    if count and (last >= room or count > max(room, SMALL)):
        raise ArchiveError("a tensor is larger than its storage")
    if not count:
        return torch.empty(shape, dtype=dtype)
    return content[: room * dtype.itemsize].view(dtype).as_strided(shape, stride, offset)


def _no_hooks(*parts: Any) -> dict[Any, Any]:
    if parts:
        raise ArchiveError("a tensor comes with more than its numbers")
    return {}


def _bytes(*parts: Any) -> bytes:
    return parts[0].encode("latin1") if parts else b""


def _set(items: list[Any]) -> set[Any]:
    if not isinstance(items, list):
        raise ArchiveError("a set is made of no list")
    return set(items)


def _complex(real: float, imaginary: float) -> complex:
    return complex(float(real), float(imaginary))


def _size(numbers: tuple[int, ...]) -> torch.Size:
    return torch.Size(numbers)


MAKERS: dict[str, Callable[..., Any]] = {
    "torch._utils _rebuild_tensor_v2": _tensor,
    "torch._utils _rebuild_tensor_v3": _typed,
    "torch Size": _size,
    "collections OrderedDict": _no_hooks,
    "_codecs encode": _bytes,
    "__builtin__ bytes": _bytes,
    "__builtin__ set": _set,
    "__builtin__ complex": _complex,
}
