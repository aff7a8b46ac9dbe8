"""Store a tree of plain values and arrays in one safetensors file. Reading executes nothing in the file.

A file has the length of its header, the header (JSON) and the bytes of all tensors:
https://github.com/huggingface/safetensors#format. The header's metadata has the tree as JSON under `tree`, in which
`{"$": "tensor", "name": NAME}` refers to a tensor. Other readers of safetensors find the tensors by their names.

Reading an untrusted file allocates no more memory than the size of the file, plus a bounded number of Python objects:
lengths are compared with the actual bytes, and values counted, before anything is allocated. A checksum detects damage.
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
from zhixing.utils.files import parse_json

MAX_HEADER = 32 << 20  # bytes
MAX_CONTAINERS = 500_000  # lists and dicts in a header, each of which needs 20 times the memory of its text
MAX_KEY_PARTS = 16  # elements of a tuple used as dict key
MAX_DIMS = 32
MAX_USES = 16  # references to one tensor; bounds the memory of a caller that copies all of them
TAG = "$"  # key of dicts that encode types which JSON lacks
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
    "BF16": np.dtype("<u2"),  # NumPy has no bfloat16
}
CODES = {dtype: code for code, dtype in DTYPES.items() if code != "BF16"}
Array = np.ndarray[Any, np.dtype[Any]]


# --- writing ---


def write_archive(file: BinaryIO, tree: Any) -> None:
    """Write a tree of None, bool, int, float, str, bytes, lists, tuples, dicts, NumPy arrays and tensors.

    Raises `UserError` for other types. A tensor with several references is written once.
    """
    encoder = _Encoder()
    text = json.dumps(encoder.encode(tree, ""), separators=(",", ":"))
    ordered = sorted(encoder.arrays.items(), key=lambda item: -item[1][1].itemsize)  # aligns all tensors
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
            f"the state has {len(content):,} bytes outside of arrays; a checkpoint allows {MAX_HEADER:,} bytes and "
            f"{MAX_CONTAINERS:,} lists and dicts; convert long lists to NumPy arrays"
        )
    file.write(len(content).to_bytes(8, "little"))
    file.write(content)
    for _, (_, array) in ordered:
        file.write(_bytes(array))


class _Encoder:
    """Encodes a tree as JSON and collects its arrays with their safetensors types by name."""

    def __init__(self) -> None:
        self.arrays: dict[str, tuple[str, Array]] = {}
        self._names: dict[Any, str] = {}  # of tensors by memory location

    def encode(self, tree: Any, path: str) -> Any:
        if tree is None or type(tree) in (bool, int, float, str):
            return tree
        if isinstance(tree, np.generic):
            return self.encode(tree.item(), path)
        if isinstance(tree, Mapping):
            if all(type(key) is str for key in tree) and TAG not in tree:
                return {key: self.encode(value, f"{path}.{key}") for key, value in tree.items()}
            items = [[self.encode(_key(k, path), path), self.encode(tree[k], f"{path}.{k}")] for k in tree]
            return {TAG: "dict", "items": items}
        if type(tree) in (list, tuple, torch.Size):
            parts = [self.encode(value, f"{path}.{i}") for i, value in enumerate(tree)]
            return parts if type(tree) is list else {TAG: "tuple", "items": parts}
        if type(tree) is bytes:
            return {TAG: "bytes", "base64": base64.b64encode(tree).decode()}
        if isinstance(tree, torch.Tensor):
            location = (tree.data_ptr(), tree.shape, tree.stride(), tree.dtype)
            if location not in self._names:
                self._names[location] = self._add(tree, path)
            return {TAG: "tensor", "name": self._names[location]}
        return {TAG: "array", "name": self._add(tree, path)}

    def _add(self, tree: Any, path: str) -> str:
        code, array = None, tree
        if isinstance(tree, torch.Tensor) and tree.dtype == torch.bfloat16:
            code, array = "BF16", tree.detach().cpu().contiguous().view(torch.uint16).numpy()
        elif isinstance(tree, torch.Tensor):
            array = tree.detach().cpu().numpy()
        if code is None and isinstance(array, np.ndarray):
            code = CODES.get(array.dtype.newbyteorder("<"))
        if code is None:
            name = f"{type(tree).__name__} of {tree.dtype}" if hasattr(tree, "dtype") else type(tree).__name__
            raise UserError(
                f"state{path} is a {name}, which can't be saved in a checkpoint; return numbers, strings, tensors, "
                f"NumPy arrays, and lists, tuples and dicts of these from state_dict()"
            )
        name = path.lstrip(".") or "root"
        while name in self.arrays or name == "__metadata__":  # {"a": {"b": x}, "a.b": y}
            name += "~"
        self.arrays[name] = code, np.asarray(array, DTYPES[code], order="C")
        return name


def _bytes(array: Array) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _key(key: Any, path: str) -> Any:
    """Return a dict key as plain values. Raises `UserError` for types that may not be hashable after reading."""
    plain = key.item() if isinstance(key, np.generic) else key
    parts = plain if type(plain) is tuple else (plain,)
    if len(parts) > MAX_KEY_PARTS or not all(type(part) in (bool, int, float, str, type(None)) for part in parts):
        raise UserError(
            f"a dict key in state{path} is a {type(key).__name__}, which can't be saved; use numbers, strings or "
            f"tuples of up to {MAX_KEY_PARTS} of these"
        )
    return plain


def _containers(content: bytes) -> int:
    return content.count(b"[") + content.count(b"{")


# --- reading ---


def read_archive(path: Path) -> Any:
    """Return the tree in a file. Raises exceptions of various types if `write_archive` didn't write the file."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(MAX_HEADER, size - 8):
            raise ValueError("its header is missing")
        content = file.read(length)
        if _containers(content) > MAX_CONTAINERS:
            raise ValueError("its header has too many values")
        header = parse_json(content)
        metadata = header.pop("__metadata__")
        _check_header(header, size - 8 - length)
        checksum = zlib.crc32(metadata["tree"].encode())
        arrays: dict[str, tuple[str, Array]] = {}
        for name, entry in header.items():
            array = np.empty(entry["shape"], DTYPES[entry["dtype"]])
            file.readinto(_bytes(array))
            checksum = zlib.crc32(_bytes(array), checksum)
            arrays[name] = entry["dtype"], array
    if metadata["checksum"] != f"{checksum:08x}":
        raise ValueError("its checksum doesn't match")
    uses: Counter[str] = Counter()

    def get_array(name: str) -> tuple[str, Array]:
        uses[name] += 1
        if uses[name] > MAX_USES:
            raise ValueError("a tensor has too many references")
        return arrays[name]

    return _decode(parse_json(metadata["tree"]), get_array)


def _check_header(header: dict[str, Any], size: int) -> None:
    """Compare all shapes with the number of bytes in the file, before memory is allocated."""
    offset = 0
    for entry in header.values():
        dtype, shape, (begin, end) = DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
        numbers = (begin, end, *shape)
        if len(shape) > MAX_DIMS or not all(type(number) is int and 0 <= number < 2**48 for number in numbers):
            raise ValueError("a tensor has an invalid shape")
        if begin != offset or end != begin + math.prod(shape) * dtype.itemsize:
            raise ValueError("the size of a tensor doesn't match its shape")
        offset = end
    if offset != size:
        raise ValueError("its size doesn't match its header")


def _decode(tree: Any, get_array: Callable[[str], tuple[str, Array]]) -> Any:
    if isinstance(tree, list):
        return [_decode(value, get_array) for value in tree]
    if not isinstance(tree, dict):
        return tree
    kind = tree.get(TAG)
    if kind is None:
        return {key: _decode(value, get_array) for key, value in tree.items()}
    if kind == "dict":
        return {_key(_decode(key, get_array), ""): _decode(value, get_array) for key, value in tree["items"]}
    if kind == "tuple":
        return tuple(_decode(value, get_array) for value in tree["items"])
    if kind == "bytes":
        return base64.b64decode(tree["base64"], validate=True)
    code, array = get_array(tree["name"])
    if kind == "array" and code != "BF16":
        return array
    if kind == "tensor":
        tensor = torch.from_numpy(array)
        return tensor.view(torch.bfloat16) if code == "BF16" else tensor
    raise ValueError("it has values of an unknown type")
