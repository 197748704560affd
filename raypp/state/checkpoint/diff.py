"""Compares two checkpoints of any meshes tensor by tensor, in pieces and without torch."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from raypp.state.checkpoint.arrays import FLOATS, Array, as_float64
from raypp.state.checkpoint.saved_tensors import SavedTensors, TensorInfo
from raypp.state.checkpoint.tensor_file import OPTIMIZER

_PIECE_BYTES = 16 << 20


@dataclass(frozen=True)
class Difference:
    """A tensor whose values differ. `elements`: number of elements that differ in any bit. `of`:
    number of all elements. `max_abs`: largest |a − b|; infinite or NaN where the values are.
    `max_rel`: largest |a − b| ÷ max(|a|, |b|)."""

    name: str
    elements: int
    of: int
    max_abs: float
    max_rel: float


@dataclass(frozen=True)
class Comparison:
    """How two checkpoints differ. `only_a`, `only_b`: tensors that only the first, the second has.
    `other_form`: tensors whose dtype or shape differs: the first's, the second's."""

    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    other_form: tuple[tuple[TensorInfo, TensorInfo], ...]
    different: tuple[Difference, ...]
    equal: int

    @property
    def same(self) -> bool:
        return not (self.only_a or self.only_b or self.other_form or self.different)


def diff_checkpoints(
    a: SavedTensors, b: SavedTensors, *, optimizer: bool = True, progress: Callable[[int], None] = lambda _bytes: None
) -> Comparison:
    """Compares all tensors and checks every byte it reads against its checksum. Raises
    CheckpointError: an object of either checkpoint is missing, torn or corrupt."""
    in_a, in_b = _names(a.infos, optimizer), _names(b.infos, optimizer)
    both = [name for name in in_a if name in b.infos]
    forms, different, equal = [], [], 0
    for name in both:
        left, right = a.infos[name], b.infos[name]
        if (left.dtype, left.shape) != (right.dtype, right.shape):
            forms.append((left, right))
            continue
        difference = _compare(a, b, left, progress)
        if difference.elements:
            different.append(difference)
        else:
            equal += 1
    return Comparison(
        tuple(name for name in in_a if name not in b.infos),
        tuple(name for name in in_b if name not in a.infos),
        tuple(forms),
        tuple(different),
        equal,
    )


def _names(infos: Iterable[str], optimizer: bool) -> list[str]:
    return [name for name in infos if optimizer or not name.startswith(OPTIMIZER)]


def _compare(a: SavedTensors, b: SavedTensors, info: TensorInfo, progress: Callable[[int], None]) -> Difference:
    elements, count, largest, relative = 0, 0, 0.0, 0.0
    for first, last in info.pieces(_PIECE_BYTES):
        left, right = a.rows(info.name, first, last), b.rows(info.name, first, last)
        count += left.size
        unequal = _bits(left) != _bits(right)
        if unequal.any():
            elements += int(np.count_nonzero(unequal))
            absolute, ratio = _distance(left[unequal], right[unequal], info.dtype)
            # np.maximum propagates NaN; max() would lose it.
            largest, relative = float(np.maximum(largest, absolute)), float(np.maximum(relative, ratio))
        progress((last - first) * info.row_bytes)
    return Difference(info.name, elements, count, largest, relative)


def _distance(left: Array, right: Array, dtype: str) -> tuple[float, float]:
    x, y = (as_float64(values, dtype if dtype in FLOATS else "I64") for values in (left, right))
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        apart = np.abs(x - y)
        scale = np.maximum(np.abs(x), np.abs(y))
        return float(apart.max()), float(np.where(scale > 0, apart / np.where(scale > 0, scale, 1), 0.0).max())


def _bits(values: Array) -> Array:
    """Returns the elements' bits as integers, so that equality means bitwise equality."""
    return values.reshape(values.shape).view(f"u{values.dtype.itemsize}")
