"""What a checkpoint holds besides tensors and has a meaning for raypp: the same on every rank."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from raypp.records import StepReport
from raypp.untrusted.documents import Bounds, Count, parse_as


@dataclass(frozen=True)
class PartPosition:
    """Where a part of a mixture resumes, and what it was: see `raypp.data.mixture`."""

    epoch: Count
    block: Count
    row: Count
    rows: Count
    tokens: Count
    digest: str
    weight: float
    most_epochs: float | None
    most_tokens: Count | None


@dataclass(frozen=True)
class DataPosition:
    """Where the data resume: see `Loader.position`. Only a mixture has parts."""

    epoch: Count
    block: Count
    row: Count
    data: str
    parts: tuple[PartPosition, ...] = ()
    template: str = ""


@dataclass(frozen=True)
class Extra:
    """The known keys of `Commit.extra`, and of what a snapshot in memory holds.

    Attributes:
        data_position: None for a checkpoint of imported weights.
        recent_steps: The reports of the last steps, oldest first.
    """

    data_position: DataPosition | None = None
    recent_steps: tuple[StepReport, ...] = ()


def read_extra(extra: Mapping[str, Any], place: str) -> Extra:
    """Returns the known keys; others are the writer's own.

    Args:
        extra: Values from JSON.
        place: The key of the COMMIT, or the name of the file, for errors.

    Raises:
        CheckpointError: A value has another shape.
    """
    data = json.dumps(extra).encode()
    fix = "use an older checkpoint (a resume does so by itself)"
    return parse_as(Extra, data, place, Bounds(), fix=fix, kind="a valid state", unknown="ignore")
