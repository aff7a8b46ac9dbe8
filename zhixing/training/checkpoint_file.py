"""Trees of plain values and arrays in one file, in the safetensors format. Nothing in a file is executed or believed.

A file is the length of its header, the header (JSON) and the bytes of all tensors, one after the other:
https://github.com/huggingface/safetensors#format. What isn't a tensor stands as JSON in the header's metadata, as
`tree`; a tensor in it is `{"$": "tensor", "name": NAME}`. Any reader of safetensors finds the tensors by their names.

Reading takes no more memory than the file is large, and a bounded number of single values: every length is compared
with the bytes that are there, and values are counted before they are made. A checksum finds damage.
"""

from __future__ import annotations

import base64
import json
import math
import os
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from zhixing.errors import UserError

MAX_HEADER = 32 << 20  # bytes
MAX_CONTAINERS = 500_000  # lists and dicts in a header: each takes 20 times the memory of its text
MAX_KEY_PARTS = 16  # of a tuple that is a key
MAX_DIMS = 32
MAX_USES = 16  # of one tensor: who copies them all takes no more than so many times the file
TAG = "$"  # marks a dict in the tree that stands for something that JSON lacks
DTYPES = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype("<u2"),
    "I16": np.dtype("<i2"),
    "U32": np.dtype("<u4"),
    "I32": np.dtype("<i4"),
    "U64": np.dtype("<u8"),
    "I64": np.dtype("<i8"),
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
    "BF16": np.dtype("<u2"),  # which NumPy lacks
}
CODES = {dtype: code for code, dtype in DTYPES.items() if code != "BF16"}
Array = np.ndarray[Any, np.dtype[Any]]


# --- writing ---


def write_archive(file: BinaryIO, tree: Any) -> None:
    """Write a tree of None, bool, int, float, str, bytes, lists, tuples, dicts, NumPy arrays and tensors. Raise
    `UserError` for anything else. A tensor that stands in several places is written once."""
    encoder = _Encoder()
    text = json.dumps(encoder.encode(tree, ""), separators=(",", ":"))
    ordered = sorted(encoder.arrays.items(), key=lambda item: -item[1][1].itemsize)  # so each is aligned
    header: dict[str, Any] = {"__metadata__": {"tree": text}}
    end, checksum = 0, zlib.crc32(text.encode())
    for name, (code, array) in ordered:
        header[name] = {"dtype": code, "shape": list(array.shape), "data_offsets": [end, end + array.nbytes]}
        end += array.nbytes
        checksum = zlib.crc32(_bytes(array), checksum)
    header["__metadata__"]["checksum"] = f"{checksum:08x}"
    content = json.dumps(header, separators=(",", ":")).encode()
    content += b" " * (-len(content) % 8)
    if len(content) > MAX_HEADER or _containers(content) > MAX_CONTAINERS:
        raise UserError(
            f"the state holds {len(content):,} bytes of single values, which a checkpoint can't hold (allowed are "
            f"{MAX_HEADER:,} bytes, {MAX_CONTAINERS:,} lists and dicts); keep long lists as NumPy arrays"
        )
    file.write(len(content).to_bytes(8, "little"))
    file.write(content)
    for _, (_, array) in ordered:
        file.write(_bytes(array))


class _Encoder:
    """Turns a tree into JSON and collects its arrays, with their types, by name."""

    def __init__(self) -> None:
        self.arrays: dict[str, tuple[str, Array]] = {}
        self._names: dict[Any, str] = {}  # of tensors, by where they are in memory

    def encode(self, tree: Any, where: str) -> Any:
        if tree is None or type(tree) in (bool, int, float, str):
            return tree
        if isinstance(tree, np.generic):
            return self.encode(tree.item(), where)
        if isinstance(tree, Mapping):
            if all(type(key) is str for key in tree) and TAG not in tree:
                return {key: self.encode(value, f"{where}.{key}") for key, value in tree.items()}
            items = [[self.encode(_key(k, where), where), self.encode(tree[k], f"{where}.{k}")] for k in tree]
            return {TAG: "dict", "items": items}
        if type(tree) in (list, tuple, torch.Size):
            parts = [self.encode(value, f"{where}.{i}") for i, value in enumerate(tree)]
            return parts if type(tree) is list else {TAG: "tuple", "items": parts}
        if type(tree) is bytes:
            return {TAG: "bytes", "base64": base64.b64encode(tree).decode()}
        if isinstance(tree, torch.Tensor):
            place = (tree.data_ptr(), tree.shape, tree.stride(), tree.dtype)
            if place not in self._names:
                self._names[place] = self._add(tree, where)
            return {TAG: "tensor", "name": self._names[place]}
        return {TAG: "array", "name": self._add(tree, where)}

    def _add(self, tree: Any, where: str) -> str:
        code, array = None, tree
        if isinstance(tree, torch.Tensor) and tree.dtype == torch.bfloat16:
            code, array = "BF16", tree.detach().cpu().contiguous().view(torch.uint16).numpy()
        elif isinstance(tree, torch.Tensor):
            array = tree.detach().cpu().numpy()
        if code is None and isinstance(array, np.ndarray):
            code = CODES.get(array.dtype.newbyteorder("<"))
        if code is None:
            found = f"{type(tree).__name__} of {tree.dtype}" if hasattr(tree, "dtype") else type(tree).__name__
            raise UserError(
                f"the state{where} is a {found}, which a checkpoint can't hold; let state_dict give numbers, strings, "
                f"tensors, NumPy arrays, and lists, tuples and dicts of them"
            )
        name = where.lstrip(".") or "it"
        while name in self.arrays or name == "__metadata__":  # {"a": {"b": x}, "a.b": y}
            name += "~"
        self.arrays[name] = code, np.asarray(array, DTYPES[code], order="C")
        return name


def _bytes(array: Array) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _key(key: Any, where: str) -> Any:
    """A key as plain values: one that could be read never fails to be hashed."""
    plain = key.item() if isinstance(key, np.generic) else key
    parts = plain if type(plain) is tuple else (plain,)
    if len(parts) > MAX_KEY_PARTS or not all(type(part) in (bool, int, float, str, type(None)) for part in parts):
        raise UserError(f"a key of the state{where} is a {type(key).__name__}; allowed are numbers, text and tuples")
    return plain


def _containers(content: bytes) -> int:
    return content.count(b"[") + content.count(b"{")


# --- reading ---


def read_archive(path: Path) -> Any:
    """Return the tree in a file. Raises some error for a file that `write_archive` never wrote."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(MAX_HEADER, size - 8):
            raise ValueError("it has no header")
        content = file.read(length)
        if _containers(content) > MAX_CONTAINERS:
            raise ValueError("its header holds too many values")
        header = json.loads(content)
        metadata = header.pop("__metadata__")
        _check_header(header, size - 8 - length)
        checksum = zlib.crc32(metadata["tree"].encode())
        arrays: dict[str, tuple[str, Array]] = {}
        for name, about in header.items():
            array = np.empty(about["shape"], DTYPES[about["dtype"]])
            file.readinto(_bytes(array))
            checksum = zlib.crc32(_bytes(array), checksum)
            arrays[name] = about["dtype"], array
    if metadata["checksum"] != f"{checksum:08x}":
        raise ValueError("its checksum is wrong")
    uses: Counter[str] = Counter()

    def take(name: str) -> tuple[str, Array]:
        uses[name] += 1
        if uses[name] > MAX_USES:
            raise ValueError("a tensor stands in too many places")
        return arrays[name]

    return _decode(json.loads(metadata["tree"]), take)


def _check_header(header: dict[str, Any], size: int) -> None:
    """Compare all shapes with the bytes that are there, before any memory is taken."""
    at = 0
    for about in header.values():
        dtype, shape, (begin, end) = DTYPES[about["dtype"]], about["shape"], about["data_offsets"]
        numbers = (begin, end, *shape)
        if len(shape) > MAX_DIMS or not all(type(number) is int and 0 <= number < 2**48 for number in numbers):
            raise ValueError("a tensor has no shape")
        if begin != at or end != begin + math.prod(shape) * dtype.itemsize:
            raise ValueError("a tensor is smaller or larger than it says")
        at = end
    if at != size:
        raise ValueError("it is shorter or longer than it says")


def _decode(tree: Any, take: Callable[[str], tuple[str, Array]]) -> Any:
    if isinstance(tree, list):
        return [_decode(value, take) for value in tree]
    if not isinstance(tree, dict):
        return tree
    kind = tree.get(TAG)
    if kind is None:
        return {key: _decode(value, take) for key, value in tree.items()}
    if kind == "dict":
        return {_key(_decode(key, take), ""): _decode(value, take) for key, value in tree["items"]}
    if kind == "tuple":
        return tuple(_decode(value, take) for value in tree["items"])
    if kind == "bytes":
        return base64.b64decode(tree["base64"], validate=True)
    code, array = take(tree["name"])
    if kind == "array" and code != "BF16":
        return array
    if kind == "tensor":
        tensor = torch.from_numpy(array)
        return tensor.view(torch.bfloat16) if code == "BF16" else tensor
    raise ValueError("it holds values of an unknown kind")
