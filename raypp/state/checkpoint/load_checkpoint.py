"""Loads a state onto any mesh: each rank reads, checks and copies the byte ranges it needs.

The state is objects, of a checkpoint in a store or of snapshots in memory (`Load`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from raypp.errors import CheckpointError, Problem
from raypp.records import Progress, no_progress
from raypp.state.checkpoint.commit import list_checkpoints, read_commit
from raypp.state.checkpoint.ranged_reads import (
    CheckpointFile,
    ObjectInMemory,
    Piece,
    by_name,
    fetch_ranges,
    open_files,
    overlaps,
    ranges_of,
)
from raypp.state.checkpoint.state import DTYPES, SavedResiduals, Slice, model_slices, optimizer_slices, residual_slices
from raypp.state.checkpoint.tensor_file import OPTIMIZER, TensorEntry, cover_once, volume
from raypp.storage import ObjectStore

_PROBLEMS_SHOWN = 8


@dataclass(frozen=True)
class Loaded:
    """The result of `load_checkpoint`. `extra`: what the trainer passed to `save`, the same on
    every rank. `remark`: what is not as it was saved, for people; "" if all is."""

    step: int
    extra: dict[str, Any]
    bytes_read: int
    remark: str = ""

    @property
    def data_position(self) -> dict[str, Any] | None:
        """Position at which the data resume, the same on every rank."""
        return self.extra.get("data_position")


def load_checkpoint(
    store: ObjectStore,
    run: str,
    step: int | None,
    stages: Sequence[nn.Module],
    optimizer: torch.optim.Optimizer | None,
    progress: Progress = no_progress,
) -> Loaded | None:
    """Fills this rank's parameters and optimizer state, in place, from a checkpoint of any mesh.

    Not a collective. Replaces everything, or nothing if it raises. `step`: the step to load; None
    for the newest committed one. `optimizer`: the optimizer over their parameters; None to load
    weights only. Returns None if `step` is None and nothing is committed. Raises CheckpointError:
    there is no such commit; or an object, which the message names, is missing, torn or corrupt; or
    tensors, which it names too, are missing or have other shapes.
    """
    if step is None:
        committed = list_checkpoints(store, run)
        if not committed:
            return None
        step = committed[-1].step
    commit = read_commit(store, run, step)
    load = Load(open_files(store, commit), stages, optimizer, f"step {step} of {run}")
    load.fetch(progress)
    remark = load.apply()
    return Loaded(step, dict(commit.extra), load.bytes_read, remark)


class Load:
    """What fills a rank's tensors from objects of any mesh, wherever they are.

    The constructor finds the ranges, `fetch` reads and checks them, and `apply` replaces the state:
    nothing changes before all that this rank needs has been read and verified. `origin`: names the
    state in errors. `ranges`: by object key, the ranges `[begin, end)` of its data section to read.
    Raises CheckpointError: tensors, which it names, are missing or have other shapes.
    """

    def __init__(
        self,
        files: Sequence[CheckpointFile],
        stages: Sequence[nn.Module],
        optimizer: torch.optim.Optimizer | None,
        origin: str,
    ) -> None:
        self._files, self._stages, self._optimizer = files, stages, optimizer
        self._saved = by_name(files)
        self._entries: list[tuple[Tensor, str, Any]] = []
        self._residuals: SavedResiduals | None = None
        targets = model_slices(stages)
        if optimizer is not None:
            known = {
                name: (parts[0][1].global_shape, DTYPES[parts[0][1].dtype])
                for name, parts in self._saved.items()
                if name.startswith(OPTIMIZER)
            }
            more, self._entries = optimizer_slices(stages, optimizer, known)
            targets.update(more)
            self._residuals = residual_slices(stages, known)
            targets.update(self._residuals.targets)
        self._pieces = _plan(targets, self._saved, origin)
        self._data: dict[str, ObjectInMemory] | None = None
        self.ranges = ranges_of(piece for _, piece in self._pieces)

    @property
    def bytes_read(self) -> int:
        return sum(held.size for held in (self._data or {}).values())

    def fetch(self, progress: Progress = no_progress) -> None:
        """Reads and checks ranges. Raises CheckpointError: one is missing, torn or corrupt."""
        self._data = fetch_ranges(self._files, self.ranges, progress)

    def apply(self) -> str:
        """Replaces weights and optimizer state; returns `Loaded.remark`. `fetch` comes first."""
        assert self._data is not None
        _copy(self._pieces, self._data)
        if self._optimizer is None or self._residuals is None:
            return ""
        python = {name: parts[0][1].python for name, parts in self._saved.items()}
        _fill_optimizer(self._optimizer, self._stages, self._entries, python)
        self._residuals.finish()
        return self._residuals.remark


def _plan(
    targets: Mapping[str, Sequence[Slice]],
    saved: Mapping[str, Sequence[tuple[CheckpointFile, TensorEntry]]],
    origin: str,
) -> list[tuple[Slice, Piece]]:
    """Returns the parts of the saved slices that fill the targets."""
    pieces: list[tuple[Slice, Piece]] = []
    problems: list[Problem] = []
    for name, slices in targets.items():
        for target in slices:
            filling, fault = _filling(target, saved.get(name, ()))
            pieces.extend((target, piece) for piece in filling)
            if fault:
                problems.append(Problem(name, f"{fault} ({origin})", "check that it is the same model"))
    if problems:
        left = len(problems) - _PROBLEMS_SHOWN
        more = [Problem("", f"and {left} more tensors")] if left > 0 else []
        raise CheckpointError([*problems[:_PROBLEMS_SHOWN], *more])
    return pieces


def _filling(target: Slice, parts: Sequence[tuple[CheckpointFile, TensorEntry]]) -> tuple[list[Piece], str]:
    """Returns the pieces that fill a target, and the fault if they do not ("" otherwise)."""
    if not parts:
        return [], "is not in the checkpoint"
    wrong = next((entry.global_shape for _, entry in parts if entry.global_shape != target.global_shape), None)
    if wrong is not None:
        return [], f"has shape {list(target.global_shape)} here and {list(wrong)} in the checkpoint"
    whole = tuple((a, a + n) for a, n in zip(target.offset, target.tensor.shape, strict=True))
    pieces = overlaps(whole, parts)
    size, covered = target.tensor.numel(), sum(volume(piece.box) for piece in pieces)
    if covered != size:
        return [], f"is incomplete: the checkpoint has {covered} of {size} elements of this rank's part"
    if size and not cover_once([piece.box for piece in pieces], whole):
        return [], "has overlapping slices in the checkpoint"
    return pieces, ""


@torch.no_grad()
def _copy(pieces: Sequence[tuple[Slice, Piece]], data: Mapping[str, ObjectInMemory]) -> None:
    for target, piece in pieces:
        raw = data[piece.file.record.key].view(*piece.bytes)
        source = torch.frombuffer(raw, dtype=DTYPES[piece.entry.dtype]).view(piece.shape)
        goal = target.tensor
        for dim, (begin, end) in enumerate(piece.box):
            goal = goal.narrow(dim, begin - target.offset[dim], end - begin)
            if dim:
                source = source.narrow(dim, begin - piece.entry.offset[dim], end - begin)
        goal.copy_(source)


def _fill_optimizer(
    optimizer: torch.optim.Optimizer,
    stages: Sequence[nn.Module],
    entries: Sequence[tuple[Tensor, str, Any]],
    python: Mapping[str, str],
) -> None:
    """Replaces the optimizer's state of these stages' parameters."""
    names = {id(parameter): name for stage in stages for name, parameter in stage.named_parameters()}
    for stage in stages:
        for parameter in stage.parameters():
            optimizer.state.pop(parameter, None)
    number = {"int": int, "float": float, "bool": bool}
    for owner, key, value in entries:
        kind = python.get(f"{OPTIMIZER}{names[id(owner)]}/{key}")
        optimizer.state[owner][key] = number[kind](value.item()) if kind else value
