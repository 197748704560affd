"""Keeps frozen weights between two attempts of a process.

Reading and quantising a large base takes minutes. A process that survives a restart keeps it if the
next attempt has the same base, cut and place in the mesh.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from raypp.job.job import Job
from raypp.records import Coordinates
from raypp.stages.parallel.shard import local_part


@dataclass(frozen=True)
class FrozenPart:
    """Which frozen weights a rank holds, and from which base; equal ones have equal values. `job`:
    what determines the values and how they are cut. `files`: name, size and time of every file of
    the base; empty: the weights are drawn. `place`: the rank's coordinates, without that of its
    replica, and its device."""

    job: str
    files: tuple[tuple[str, int, float], ...]
    layers: tuple[range, ...]
    place: tuple[Coordinates, str]

    @staticmethod
    def of(job: Job, layers: Sequence[range], place: Coordinates, device: str) -> FrozenPart | None:
        """Returns the part of a rank; None without frozen weights. Raises StoreError: the store of
        `model.from_hf` does not answer."""
        model, mesh = job.model, job.mesh.model_copy(update={"dp_replicate": 1})
        if model.lora is None:
            return None
        files: tuple[tuple[str, int, float], ...] = ()
        if model.from_hf is not None:
            from raypp.state.hf.model_files import HfFiles  # only runs with model.from_hf import it

            files = tuple(sorted((info.key, info.size, info.modified) for info in HfFiles(model.from_hf).listed()))
        what = f"{model.model_dump_json()} {mesh.model_dump_json()} {job.train.precision} {job.train.seed}"
        return FrozenPart(what, files, tuple(layers), (replace(place, dp_replicate=0), device))


_kept: tuple[FrozenPart, dict[str, Tensor]] | None = None


def keep(part: FrozenPart | None, stages: Sequence[nn.Module]) -> None:
    """Keeps the frozen weights of a rank's stages, which all have their values."""
    global _kept
    named = [(name, weight) for stage in stages for name, weight in stage.named_parameters()]
    held = {name: local_part(weight).detach() for name, weight in named if not weight.requires_grad}
    _kept = (part, held) if part is not None else None


def take(part: FrozenPart | None) -> Mapping[str, Tensor]:
    """Returns this rank's part of the kept weights, by global name, and keeps them no longer."""
    global _kept
    kept, _kept = _kept, None
    return kept[1] if kept is not None and kept[0] == part else {}


def forget() -> None:
    """Frees the kept weights: they may be bad."""
    global _kept
    _kept = None
