"""Array storage for the fields of a buffer, and validation of incoming batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from zhixing.core.batch import Batch
from zhixing.core.tree import Field, Tree, tree_leaves, tree_map
from zhixing.errors import UserError, unknown

Array = np.ndarray[Any, Any]

# Fields with a value before and one after the step. Storage holds the latter once, as the former of the next row.
SUCCESSORS = {"obs": "next_obs", "mask": "next_mask", "state": "next_state", "alive": "next_alive"}
REQUIRED = ("obs", "reward", "terminated", "truncated")
FLAGS = ("terminated", "truncated")


class BatchValidator:
    """Check batches against a spec and return their NumPy leaves in a fixed order."""

    def __init__(self, spec: Mapping[str, Tree]) -> None:
        for name in REQUIRED:
            if name not in spec:
                raise UserError(f"a buffer's spec needs the field {name!r}; it has {', '.join(spec)}")
        for name in SUCCESSORS.values():
            if name in spec:
                raise UserError(f"a buffer's spec must not have {name!r}: the buffer derives it from the next row")
        for name in FLAGS:
            if not isinstance(spec[name], Field) or spec[name].shape != ():
                raise UserError(f"field {name!r} must be one flag per environment, but the spec has {spec[name]}")
        self.obs_fields = [name for name in SUCCESSORS if name in spec]  # those with a successor
        self.step_fields = [*FLAGS, *(name for name in spec if name not in (*FLAGS, *SUCCESSORS))]
        self.expected: dict[str, Tree] = {**spec, **{SUCCESSORS[name]: spec[name] for name in self.obs_fields}}
        self._order = [*self.step_fields, *self.obs_fields, *(SUCCESSORS[name] for name in self.obs_fields)]
        sizes = [len(tree_leaves(self.expected[name])) for name in self._order]
        self._sizes = dict(zip(self._order, sizes, strict=True))
        # positions of the first leaf of the observations and of the first one of their successors
        self._obs_start, self._next_start = (sum(sizes[: len(self.step_fields) + n]) for n in (0, len(self.obs_fields)))
        self._shapes: dict[tuple[int, ...], list[tuple[str, Any, Any]]] = {}  # by leading dimensions

    def validate(self, batch: Batch) -> tuple[dict[str, list[Array]], tuple[int, ...]]:
        """Return the leaves of each field, and their common leading dimensions `[N]` or `[T,N]`."""
        step, obs, next_obs, leading = self.split(batch)
        leaves = iter([*step, *obs, *next_obs])
        return {name: list(islice(leaves, size)) for name, size in self._sizes.items()}, leading

    def split(self, batch: Batch) -> tuple[list[Array], list[Array], list[Array], tuple[int, ...]]:
        """Return the leaves of `step_fields`, of `obs_fields` and of their successors, and the leading dimensions.

        The first two leaves are `terminated` and `truncated`. This runs at every step.
        """
        fields = batch._fields
        try:
            flags = fields["terminated"]
            leading = flags.shape if type(flags) is np.ndarray else np.shape(batch.terminated)
            leaves = []
            for name, shape, dtype in self._shapes.get(leading) or self._expect(leading):
                value = fields[name]
                if type(value) is np.ndarray and value.shape == shape and value.dtype is dtype:
                    leaves.append(value)  # the common case: nothing to convert
                else:
                    leaves += _leaves(name, self.expected[name], getattr(batch, name), leading)
        except KeyError:
            self._check_names(batch.fields)
            raise
        if len(fields) > len(self.expected):
            self._check_names(batch.fields)
        obs, end = self._obs_start, self._next_start
        return leaves[:obs], leaves[obs:end], leaves[end:], leading

    def _expect(self, leading: tuple[int, ...]) -> list[tuple[str, Any, Any]]:
        """Return the expected shape and dtype of each field that is a single array."""
        if len(leading) not in (1, 2) or 0 in leading:
            raise UserError(
                f"field 'terminated' has shape {list(leading)}, expected [N] or [T, N] with at least one step"
            )
        trees = [(name, self.expected[name]) for name in self._order]
        self._shapes[leading] = [
            (name, leading + tree.shape, tree.dtype) if isinstance(tree, Field) else (name, None, None)
            for name, tree in trees
        ]
        return self._shapes[leading]

    def _check_names(self, names: tuple[str, ...]) -> None:
        for name in names:
            if name not in self.expected:
                raise unknown("field", name, self.expected, "(a buffer stores only the fields of its spec)")
        for name in self.expected:
            if name not in names:
                raise UserError(f"the batch lacks the field {name!r}; it has {', '.join(names)}")


def _leaves(name: str, tree: Tree, value: Tree, leading: tuple[int, ...]) -> list[Array]:
    """Return the arrays of `value` in the order of the spec `tree`, as `[*leading, *shape]` of the spec's dtype."""
    if isinstance(tree, Field):
        return [_leaf(name, tree, value, leading)]
    expected, actual = _parts(tree), _parts(value)
    if actual.keys() != expected.keys():
        raise UserError(
            f"field {name!r} has the parts {list(actual) or type(value).__name__}, expected {list(expected)}"
        )
    return [leaf for key, part in expected.items() for leaf in _leaves(f"{name}.{key}", part, actual[key], leading)]


def _parts(tree: Tree) -> dict[Any, Tree]:
    if isinstance(tree, Mapping):
        return dict(tree)
    return dict(enumerate(tree)) if isinstance(tree, tuple) else {}


def _leaf(name: str, field: Field, value: Any, leading: tuple[int, ...]) -> Array:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().numpy()
    elif not isinstance(value, np.ndarray):
        value = np.asarray(value)
    if value.shape != leading + field.shape:
        raise UserError(f"field {name!r} has shape {list(value.shape)}, expected {list(leading + field.shape)}")
    if value.dtype != field.dtype:
        if value.dtype.kind not in "biuf" or (value.dtype.kind == "f" and field.dtype.kind != "f"):
            raise UserError(f"field {name!r} has dtype {value.dtype}, expected {field.dtype}")
        value = value.astype(field.dtype)
    return value


class ArrayStore:
    """One array `[size, ...]` per leaf of a spec, allocated once: in memory, in files, or on a device.

    On the CPU the arrays are NumPy's: reading and writing a few rows takes a third of torch's time.
    """

    def __init__(self, spec: Mapping[str, Tree], size: int, device: str = "cpu", folder: Path | None = None) -> None:
        self.spec = dict(spec)
        self.device = torch.device(device)
        self.on_cpu = self.device.type == "cpu"
        self.single = {name for name, tree in self.spec.items() if isinstance(tree, Field)}  # fields of one array
        self.arrays: dict[str, list[Any]] = {
            name: [self._allocate(f"{name}.{i}", field, size, folder) for i, field in enumerate(tree_leaves(tree))]
            for name, tree in self.spec.items()
        }

    @staticmethod
    def from_arrays(spec: Mapping[str, Tree], arrays: Mapping[str, Tree]) -> ArrayStore:
        """Wrap existing arrays on the CPU without copying them. The store must not be written to."""
        store = ArrayStore(spec, 0)
        store.arrays = {name: tree_leaves(arrays[name]) for name in spec}
        return store

    def _allocate(self, name: str, field: Field, size: int, folder: Path | None) -> Any:
        shape = (size, *field.shape)
        if folder is not None:
            # asarray: indexing a memmap creates a memmap each time, which is slow
            return np.asarray(np.memmap(folder / f"{name}.bin", field.dtype, "w+", shape=shape))
        if self.on_cpu:
            try:
                return np.zeros(shape, field.dtype)  # the system provides pages only when they are written
            except MemoryError:
                gigabytes = np.prod(shape, dtype=float) * field.dtype.itemsize / 2**30
                raise UserError(
                    f"{size - 1:,} steps of {name.split('.')[0]!r} take {gigabytes:.0f} GiB, more than the available "
                    f"memory; set a smaller replay.capacity, use smaller images, or set replay.on_disk=true"
                ) from None
        return torch.zeros(shape, dtype=torch.from_numpy(np.zeros(0, field.dtype)).dtype, device=self.device)

    def write(self, arrays: list[Any], rows: Any, values: list[Array]) -> None:
        """Set the given rows of some of the store's arrays."""
        if self.on_cpu:
            for array, value in zip(arrays, values):  # noqa: B905 (hot; lengths were checked)
                array[rows] = value
            return
        at = self.to_tensor(rows) if isinstance(rows, np.ndarray) else rows
        for array, value in zip(arrays, values, strict=True):
            array[at] = self.to_tensor(np.ascontiguousarray(value))

    def to_tensor(self, array: Array) -> torch.Tensor:
        """Return a tensor on the store's device. On the CPU it shares the array's memory."""
        tensor = torch.from_numpy(array)
        return tensor if self.on_cpu else tensor.to(self.device)

    def take(self, name: str, rows: Array) -> Tree:
        """Return copies of rows of one field, as torch tensors on the device."""
        if self.on_cpu and name in self.single:  # the common case
            return torch.from_numpy(self.arrays[name][0].take(rows, 0))
        return self.to_tree(name, self.take_leaves(name, rows))

    def take_all(self, rows: Array) -> dict[str, Tree]:
        """Return copies of rows of every field, as torch tensors on the device."""
        if self.on_cpu and len(self.single) == len(self.spec):  # hot: avoids a call per field
            return {name: torch.from_numpy(arrays[0].take(rows, 0)) for name, arrays in self.arrays.items()}
        return {name: self.take(name, rows) for name in self.spec}

    def take_leaves(self, name: str, rows: Array) -> list[Any]:
        """Return copies of rows of each leaf of a field, as NumPy arrays or, on a device, tensors."""
        if self.on_cpu:
            return [array.take(rows, 0) for array in self.arrays[name]]
        at = self.to_tensor(rows)
        return [array[at] for array in self.arrays[name]]

    def to_tree(self, name: str, leaves: list[Any]) -> Tree:
        """Return the leaves of `take_leaves` as torch tensors in the structure of the spec."""
        tensors = [torch.from_numpy(leaf) for leaf in leaves] if self.on_cpu else leaves
        if isinstance(self.spec[name], Field):
            return tensors[0]
        remaining: Iterator[torch.Tensor] = iter(tensors)
        return tree_map(lambda _: next(remaining), self.spec[name])

    def export_rows(self, rows: Array) -> dict[str, Array]:
        """Return copies of rows of every leaf, by names such as `obs.0`, for a file."""
        return {
            f"{name}.{i}": leaf if self.on_cpu else leaf.cpu().numpy()
            for name in self.arrays
            for i, leaf in enumerate(self.take_leaves(name, rows))
        }

    def import_rows(self, rows: Array, leaves: Mapping[str, Array], keep: Array) -> None:
        """Write the leaves that `export_rows` returned to `rows` where the mask `keep` is true."""
        for name, arrays in self.arrays.items():
            self.write(arrays, rows[keep], [leaves[f"{name}.{i}"][keep] for i in range(len(arrays))])

    def grow(self, size: int) -> None:
        """Enlarge the arrays to `size` rows and keep their content. Not for arrays in files."""
        for name, arrays in self.arrays.items():
            for i, (array, field) in enumerate(zip(arrays, tree_leaves(self.spec[name]), strict=True)):
                larger = self._allocate("", field, size, None)
                larger[: len(array)] = array
                arrays[i] = larger


class SlotAllocator:
    """A store whose rows ("slots") are allocated and released. It doubles its size when no slot is free."""

    def __init__(self, spec: Mapping[str, Tree], device: str) -> None:
        self.store = ArrayStore(spec, 16, device)
        self._size = 16
        self._free = list(range(16))

    def allocate(self, n: int) -> Array:
        while len(self._free) < n:
            self._free.extend(range(self._size, 2 * self._size))
            self._size *= 2
            self.store.grow(self._size)
        first = len(self._free) - n
        slots = np.array(self._free[first:], np.int64)
        del self._free[first:]
        return slots

    def release(self, slots: Array) -> None:
        self._free.extend(slots.tolist())
