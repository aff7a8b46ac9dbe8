"""What a buffer stores: arrays for each field of a spec, and the check of what comes in."""

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

# fields whose value after the step is wanted too; storage keeps it as the next row, not a second time
SUCCESSORS = {"obs": "next_obs", "mask": "next_mask", "state": "next_state", "alive": "next_alive"}
REQUIRED = ("obs", "reward", "terminated", "truncated")


class BatchValidator:
    """Turns a batch into lists of NumPy leaves in the spec's order, or says which field is wrong and how."""

    def __init__(self, spec: Mapping[str, Tree]) -> None:
        for name in REQUIRED:
            if name not in spec:
                raise UserError(f"a buffer's spec needs the field {name!r}; it has {', '.join(spec)}")
        for name in SUCCESSORS.values():
            if name in spec:
                raise UserError(f"a buffer's spec must not have {name!r}: it is made from the next row")
        for name in ("terminated", "truncated"):
            if not isinstance(spec[name], Field) or spec[name].shape != ():
                raise UserError(f"field {name!r} must be one flag per environment, the spec has {spec[name]}")
        after = {SUCCESSORS[name]: tree for name, tree in spec.items() if name in SUCCESSORS}
        self.expected: dict[str, Tree] = {**spec, **after}
        flags = ("terminated", "truncated")
        self.followed = [name for name in SUCCESSORS if name in spec]
        self.plain = [*flags, *(name for name in spec if name not in (*flags, *SUCCESSORS))]
        self._order = [*self.plain, *self.followed, *(SUCCESSORS[name] for name in self.followed)]
        sizes = [len(tree_leaves(self.expected[name])) for name in self._order]
        self._sizes = dict(zip(self._order, sizes, strict=True))
        # where the leaves of the followed fields begin, and those of their successors
        self._now, self._after = (sum(sizes[: len(self.plain) + n]) for n in (0, len(self.followed)))
        self._shapes: dict[tuple[int, ...], list[tuple[str, Any, Any]]] = {}  # by leading dims

    def read(self, batch: Batch) -> tuple[dict[str, list[Array]], tuple[int, ...]]:
        """The leaves of each field, and the leading dimensions `[N]` or `[T,N]` that all of them have."""
        plain, now, after, lead = self.parts(batch)
        found = iter([*plain, *now, *after])
        return {name: list(islice(found, size)) for name, size in self._sizes.items()}, lead

    def parts(self, batch: Batch) -> tuple[list[Array], list[Array], list[Array], tuple[int, ...]]:
        """The same without names: the leaves of the `plain` fields, which begin with the two flags, then those of the
        fields that are `followed`, and of their successors. This runs at every step."""
        fields = batch._fields
        try:
            flags = fields["terminated"]
            lead = flags.shape if type(flags) is np.ndarray else np.shape(batch.terminated)
            found = []
            for name, shape, dtype in self._shapes.get(lead) or self._expect(lead):
                value = fields[name]
                if type(value) is np.ndarray and value.shape == shape and value.dtype is dtype:
                    found.append(value)  # as it should be, nearly always
                else:
                    found += leaves(name, self.expected[name], getattr(batch, name), lead)
        except KeyError:
            self._check_names(batch.fields)
            raise
        if len(fields) > len(self.expected):
            self._check_names(batch.fields)
        return found[: self._now], found[self._now : self._after], found[self._after :], lead

    def _expect(self, lead: tuple[int, ...]) -> list[tuple[str, Any, Any]]:
        """What each field should be with these leading dimensions, if it is a single array."""
        if len(lead) not in (1, 2) or 0 in lead:
            raise UserError(f"field 'terminated' has shape {list(lead)}, expected [N] or [T, N] with at least one step")
        trees = [(name, self.expected[name]) for name in self._order]
        self._shapes[lead] = [
            (name, lead + tree.shape, tree.dtype) if isinstance(tree, Field) else (name, None, None)
            for name, tree in trees
        ]
        return self._shapes[lead]

    def _check_names(self, names: tuple[str, ...]) -> None:
        for name in names:
            if name not in self.expected:
                raise unknown("field", name, self.expected, "(a buffer stores only what its spec declares)")
        for name in self.expected:
            if name not in names:
                raise UserError(f"the batch lacks the field {name!r}; it has {', '.join(names)}")


def leaves(name: str, tree: Tree, value: Tree, lead: tuple[int, ...]) -> list[Array]:
    """The arrays of `value` in the order of the spec `tree`, each `[*lead, *shape]` and of the spec's dtype."""
    if isinstance(tree, Field):
        return [_leaf(name, tree, value, lead)]
    parts = _parts(tree)
    given = _parts(value)
    if given.keys() != parts.keys():
        got = list(given) or type(value).__name__
        raise UserError(f"field {name!r} has the parts {got}, expected {list(parts)}")
    return [leaf for key, part in parts.items() for leaf in leaves(f"{name}.{key}", part, given[key], lead)]


def _parts(tree: Tree) -> dict[Any, Tree]:
    if isinstance(tree, Mapping):
        return dict(tree)
    return dict(enumerate(tree)) if isinstance(tree, tuple) else {}


def _leaf(name: str, field: Field, value: Any, lead: tuple[int, ...]) -> Array:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().numpy()
    elif not isinstance(value, np.ndarray):
        value = np.asarray(value)
    if value.shape != lead + field.shape:
        raise UserError(f"field {name!r} has shape {list(value.shape)}, expected {list(lead + field.shape)}")
    if value.dtype != field.dtype:
        if value.dtype.kind not in "biuf" or (value.dtype.kind == "f" and field.dtype.kind != "f"):
            raise UserError(f"field {name!r} has numbers of type {value.dtype}, expected {field.dtype}")
        value = value.astype(field.dtype)
    return value


class ArrayStore:
    """One array `[size, ...]` per leaf of a spec, allocated once: in memory, in files, or on a device.

    On the CPU these are NumPy arrays, whose reads and writes of a few rows cost a third of torch's.
    """

    def __init__(self, spec: Mapping[str, Tree], size: int, device: str = "cpu", folder: Path | None = None) -> None:
        self.spec = dict(spec)
        self.device = torch.device(device)
        self.on_cpu = self.device.type == "cpu"
        self.single = {name for name, tree in self.spec.items() if isinstance(tree, Field)}  # fields of one array
        self.arrays: dict[str, list[Any]] = {
            name: [self._allocate(f"{name}.{i}", field, size, folder) for i, field in enumerate(fields)]
            for name, fields in ((name, tree_leaves(tree)) for name, tree in self.spec.items())
        }

    @staticmethod
    def over(spec: Mapping[str, Tree], arrays: Mapping[str, Tree]) -> ArrayStore:
        """A table of arrays that are there already, on the CPU and only to be read."""
        table = ArrayStore(spec, 0)
        table.arrays = {name: tree_leaves(arrays[name]) for name in spec}
        return table

    def _allocate(self, name: str, field: Field, size: int, folder: Path | None) -> Any:
        shape = (size, *field.shape)
        if folder is not None:
            # asarray: plain indexing of a memmap makes a memmap each time, which is slow
            return np.asarray(np.memmap(folder / f"{name}.bin", field.dtype, "w+", shape=shape))
        if self.on_cpu:
            try:
                return np.zeros(shape, field.dtype)  # pages are taken from the system only when written
            except MemoryError:
                wanted = np.prod(shape, dtype=float) * field.dtype.itemsize / 2**30
                told = f"{size - 1:,} steps of {name.split('.')[0]!r} take {wanted:.0f} GiB, more than there is"
                raise UserError(
                    f"{told}; set a smaller replay.capacity, smaller pictures, or replay.on_disk=true"
                ) from None
        return torch.zeros(shape, dtype=torch.from_numpy(np.zeros(0, field.dtype)).dtype, device=self.device)

    def put(self, name: str, where: Any, values: list[Array]) -> None:
        self.write(self.arrays[name], where, values)

    def write(self, arrays: list[Any], where: Any, values: list[Array]) -> None:
        """Set the rows `where` of some of the table's arrays."""
        if self.on_cpu:
            for array, value in zip(arrays, values):  # noqa: B905 (lengths were checked; this is hot)
                array[where] = value
            return
        at = self.tensor(where) if isinstance(where, np.ndarray) else where
        for array, value in zip(arrays, values, strict=True):
            array[at] = self.tensor(np.ascontiguousarray(value))

    def tensor(self, array: Array) -> torch.Tensor:
        """On the table's device; shares memory on the CPU."""
        tensor = torch.from_numpy(array)
        return tensor if self.on_cpu else tensor.to(self.device)

    def take(self, name: str, index: Array) -> Tree:
        """Copies of the rows `index`, as torch tensors on the device."""
        if self.on_cpu and name in self.single:  # nearly always
            return torch.from_numpy(self.arrays[name][0].take(index, 0))
        return self.tree(name, self.leaves(name, index))

    def take_all(self, index: Array) -> dict[str, Tree]:
        """The same of every field."""
        if self.on_cpu and len(self.single) == len(self.spec):  # without a call per field: this is hot
            return {name: torch.from_numpy(arrays[0].take(index, 0)) for name, arrays in self.arrays.items()}
        return {name: self.take(name, index) for name in self.spec}

    def leaves(self, name: str, index: Array) -> list[Any]:
        """The same, leaf by leaf, of the kind that the table holds."""
        return [self._take(array, index) for array in self.arrays[name]]

    def tree(self, name: str, leaves: list[Any]) -> Tree:
        """Leaves of the table's kind as torch tensors, in the spec's shape."""
        tensors = [torch.from_numpy(leaf) for leaf in leaves] if self.on_cpu else leaves
        if isinstance(self.spec[name], Field):
            return tensors[0]
        copies: Iterator[torch.Tensor] = iter(tensors)
        return tree_map(lambda _: next(copies), self.spec[name])

    def _take(self, array: Any, index: Array) -> Any:
        return array.take(index, 0) if self.on_cpu else array[self.tensor(index)]

    def rows(self, index: Array) -> dict[str, Array]:
        """Copies of the rows `index` of every leaf, under plain names, for a file."""
        return {
            f"{name}.{i}": leaf if self.on_cpu else leaf.cpu().numpy()
            for name in self.arrays
            for i, leaf in enumerate(self.leaves(name, index))
        }

    def set_rows(self, index: Array, rows: Mapping[str, Array], keep: Array) -> None:
        """The inverse of `rows`, for those of them that the mask `keep` selects."""
        for name, arrays in self.arrays.items():
            self.put(name, index[keep], [rows[f"{name}.{i}"][keep] for i in range(len(arrays))])

    def grow(self, size: int) -> None:
        """Room for `size` rows; what is there stays (in memory or on the device, never in files)."""
        for name, arrays in self.arrays.items():
            for i, (array, field) in enumerate(zip(arrays, tree_leaves(self.spec[name]), strict=True)):
                larger = self._allocate("", field, size, None)
                larger[: len(array)] = array
                arrays[i] = larger


class SlotAllocator:
    """A table whose rows are handed out and given back; it doubles when it has none left."""

    def __init__(self, spec: Mapping[str, Tree], device: str) -> None:
        self.table = ArrayStore(spec, 16, device)
        self._size = 16
        self._free = list(range(16))

    def allot(self, n: int) -> Array:
        while len(self._free) < n:
            self._free.extend(range(self._size, 2 * self._size))
            self._size *= 2
            self.table.grow(self._size)
        first = len(self._free) - n
        slots = np.array(self._free[first:], np.int64)
        del self._free[first:]
        return slots

    def release(self, slots: Array) -> None:
        self._free.extend(slots.tolist())
