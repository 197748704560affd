"""From the exception that ended a rank to a kind of failure, with the evidence."""

from __future__ import annotations

import errno
import os
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path

import raypp
from raypp.control.credentials import scrubbed
from raypp.errors import DataError, JobError, RayppError, UnreachableError
from raypp.records import RankFailure, Seat
from raypp.storage import StoreError

_FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_HOST_MEMORY = ("DefaultCPUAllocator: can't allocate memory", "Cannot allocate memory", "pthread_create failed")
# By name: these classes live beside torch, which the controller's side must not import.
_BY_NAME = {
    "LostPeerError": "lost_peer",
    "NonFiniteError": "nonfinite",
    "ReplicasDifferError": "corrupt",
    "BrokenWeightsError": "corrupt",
}
_LONGEST_CAUSE, _LONGEST_DETAILS = 2000, 8000


def failure_of(error: BaseException, seat: Seat, step: int) -> RankFailure:
    """The evidence an exception leaves."""
    kind, cause = kind_and_cause(error)
    return RankFailure(
        rank=seat.rank,
        label=seat.label,
        node=seat.node,
        pid=os.getpid(),
        kind=kind,
        cause=scrubbed(cause.strip()[:_LONGEST_CAUSE]),
        step=step,
        details=scrubbed("".join(traceback.format_exception(error))[-_LONGEST_DETAILS:]),
    )


def kind_and_cause(error: BaseException) -> tuple[str, str]:
    """A kind of `RankFailure.kind`, and what happened in words."""
    text = str(error) if isinstance(error, RayppError) else f"{type(error).__name__}: {error}"
    if (known := _BY_NAME.get(type(error).__name__)) is not None:
        return known, text
    for inner in _chain(error):
        if isinstance(inner, OSError) and inner.errno in _FULL:
            return "disk_full", f"{_full_place(inner)} is full: {text}"
    if isinstance(error, DataError | JobError):
        return "user_error", text
    for inner in _chain(error):
        if type(inner).__name__ == "OutOfMemoryError":
            return "out_of_memory", f"the device's memory is not enough: {text}"
        if isinstance(inner, MemoryError) or any(sign in str(inner) for sign in _NO_HOST_MEMORY):
            return "out_of_memory", f"the host's memory is not enough: {text}"
    if isinstance(error, StoreError):
        return "store_down", f"the store does not answer, or refuses: {text}"
    if isinstance(error, UnreachableError):
        return "unreachable", text
    place = None if isinstance(error, RayppError) else place_in_user_code(error)
    return "raised", f"{text} (in {place})" if place else text


def place_in_user_code(error: BaseException) -> str | None:
    """`file:line (function)` of the innermost frame that is neither raypp's nor a library's: a model or data of the
    user's own; None when there is none."""
    own = tuple(f"{Path(path).resolve()}{os.sep}" for path in _library_paths())
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if path.is_absolute() and not str(path.resolve()).startswith(own):
            return f"{frame.filename}:{frame.lineno} ({frame.name})"
    return None


def _library_paths() -> list[str]:
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    return [str(Path(raypp.__file__).parent), *(sysconfig.get_paths()[name] for name in names)]


def _full_place(error: OSError) -> str:
    return str(error.filename) if error.filename else "a file system"


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and what it came from."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__
