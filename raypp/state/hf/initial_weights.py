"""Loads initial weights from a Hugging Face model; a rank reads the rows that its slices need.

Weights that the model stores quantised are quantised as they arrive, some rows at a time.
"""

import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from raypp.errors import CheckpointError, Problem
from raypp.records import Progress, no_progress
from raypp.stages.models.quantised import Format, stored_formats
from raypp.state.checkpoint.state import DTYPES, Slice, model_slices
from raypp.state.hf.model_files import HfFiles, matching_tensors
from raypp.state.hf.names import hf_parts
from raypp.state.hf.tensor import HfTensor

_READ_BYTES = 16 << 20
_READERS = 8


@dataclass(frozen=True)
class LoadedFromHf:
    """Statistics of a rank's load. `tensors`: number read, also in part. `bytes_read`: of these."""

    tensors: int
    bytes_read: int
    seconds: float


@dataclass(frozen=True)
class _Piece:
    """Some rows of a file tensor, and the slice they are copied to. `first` and `last`: the rows
    `[first, last)` of it. `columns`: start and length of the part to copy, in every further dim.
    `goal`: `[last - first, *lengths]`: the slice to fill. `format`: the format of the goal's bytes;
    `columns` are then theirs. None: not quantised."""

    source: HfTensor
    first: int
    last: int
    columns: tuple[tuple[int, int], ...]
    goal: Tensor
    format: Format | None


def load_from_hf(
    url: str,
    stages: Sequence[nn.Module],
    *,
    frozen: bool = False,
    skip: Collection[str] = (),
    progress: Progress = no_progress,
) -> LoadedFromHf:
    """Fills this rank's parameters in place: those that are trained, or the frozen ones.

    No communication; the values do not depend on the mesh. Ranges are read by row only: for a
    tensor that is cut along another dim, a rank reads whole rows. `url`: the model's directory or
    S3 URL. `skip`: names of parameters that have their values. Raises CheckpointError: a tensor is
    missing or has another shape (no parameter was changed), a file is missing or torn, or a weight
    to be quantised is not finite.
    """
    started = time.monotonic()
    files = HfFiles(url)
    held = model_slices(stages, frozen=frozen)
    chosen = (target for slices in held.values() for target in slices if target.name not in skip)
    targets = [target for target in chosen if target.tensor.numel()]
    formats = {name: form for stage in stages for name, form in stored_formats(stage)}
    wanted = {target.name: _shape(target, formats.get(target.name)) for target in targets}
    there = matching_tensors(files, wanted)
    pieces = [piece for target in targets for piece in _pieces(target, there, formats.get(target.name))]

    @torch.no_grad()
    def fill(piece: _Piece) -> None:
        data = bytearray(files.read(piece.source, piece.first, piece.last))
        values = torch.frombuffer(data, dtype=DTYPES[piece.source.dtype])
        values = values.view((piece.last - piece.first, *piece.source.shape[1:]) if piece.source.shape else ())
        if piece.format is not None:
            try:
                values = piece.format.quantise(values.to(piece.goal.device))  # a card does it 100 times as fast
            except ValueError as error:
                raise CheckpointError(Problem(piece.source.name, f"cannot be quantised: {error}")) from None
        for dim, (begin, length) in enumerate(piece.columns, start=1):
            values = values.narrow(dim, begin, length)
        piece.goal.copy_(values)

    with ThreadPoolExecutor(_READERS) as pool:
        for done, _ in enumerate(pool.map(fill, pieces), 1):
            progress(done, len(pieces))
    sources = {piece.source.name for piece in pieces}
    return LoadedFromHf(len(sources), files.bytes_read, time.monotonic() - started)


def _shape(target: Slice, form: Format | None) -> tuple[int, ...]:
    return target.global_shape if form is None else tuple(form.shape(target.global_shape))


def _pieces(target: Slice, there: dict[str, HfTensor], form: Format | None) -> Iterator[_Piece]:
    for part in hf_parts(target.name, _shape(target, form)):
        source, goal = there[part.name], target.tensor
        offset: tuple[int, ...] = target.offset
        if part.expert is not None:
            row = part.expert - offset[0]
            if not 0 <= row < len(goal):
                continue
            goal, offset = goal[row], offset[1:]
        if not source.shape:
            yield _Piece(source, 0, 1, (), goal, form)
            continue
        columns = tuple(zip(offset[1:], goal.shape[1:], strict=True))
        step = max(1, _READ_BYTES // max(1, source.row_bytes))
        for first in range(0, len(goal), step):
            rows = goal[first : first + step]
            yield _Piece(source, offset[0] + first, offset[0] + first + len(rows), columns, rows, form)
