"""The complete tensors of a checkpoint by name, from any mesh; read in pieces, without torch."""

from dataclasses import dataclass

import numpy as np

from raypp.errors import CheckpointError, Problem
from raypp.state.checkpoint.arrays import Array, StoredTensor, numpy_dtype
from raypp.state.checkpoint.commit import Commit
from raypp.state.checkpoint.ranged_reads import by_name, fetch_ranges, open_files, overlaps, ranges_of
from raypp.state.checkpoint.tensor_file import cover_once
from raypp.storage import ObjectStore


@dataclass(frozen=True)
class TensorInfo(StoredTensor):
    """A tensor of a checkpoint. `ranks`: ranks whose objects hold slices of it."""

    ranks: tuple[int, ...] = ()


class SavedTensors:
    """A checkpoint's tensors. Raises CheckpointError: an object is missing, torn or corrupt."""

    def __init__(self, store: ObjectStore, commit: Commit) -> None:
        self._store = store
        self._files = open_files(store, commit)
        self._parts = by_name(self._files)
        self.infos: dict[str, TensorInfo] = {name: self._info(name) for name in sorted(self._parts)}
        """By global name, sorted."""

    def _info(self, name: str) -> TensorInfo:
        parts = self._parts[name]
        entry = parts[0][1]
        for file, other in parts:
            if (other.dtype, other.global_shape) != (entry.dtype, entry.global_shape):
                form, here = (f"{one.dtype} {list(one.global_shape)}" for one in (entry, other))
                raise CheckpointError(Problem(name, f"is {here} in {file.record.key}, but {form} in other objects"))
        ranks = tuple(sorted({file.record.rank for file, _ in parts}))
        return TensorInfo(name, entry.dtype, entry.global_shape, ranks)

    def rows(self, name: str, first: int, last: int) -> Array:
        """Reads the rows `[first, last)` of a tensor and checks every byte it reads. Raises
        CheckpointError: an object is missing, torn or corrupt, or slices lack rows."""
        info = self.infos[name]
        box = ((first, last), *((0, size) for size in info.shape[1:])) if info.shape else ()
        pieces = overlaps(box, self._parts[name])
        # Checked before memory is allocated: a damaged shape may be of any size.
        if not cover_once([piece.box for piece in pieces], box):
            raise CheckpointError(Problem(name, f"rows {first} to {last} are not in the checkpoint exactly once"))
        out = np.empty([end - begin for begin, end in box], numpy_dtype(info.dtype))
        data = fetch_ranges(self._files, ranges_of(pieces))
        for piece in pieces:
            values = np.frombuffer(data[piece.file.record.key].view(*piece.bytes), out.dtype).reshape(piece.shape)
            place = (slice(begin - start, end - start) for (begin, end), (start, _) in zip(piece.box, box, strict=True))
            out[tuple(place)] = values
        return out
