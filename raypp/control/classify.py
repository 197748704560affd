"""Classifies the exception that ended a rank as a kind of failure."""

from __future__ import annotations

import errno
import os
import traceback

from raypp.control.credentials import scrubbed
from raypp.errors import RayppError, causes, origin_in_words
from raypp.failure_kinds import FailureKind
from raypp.records import RankFailure, Seat

_FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_HOST_MEMORY = ("DefaultCPUAllocator: can't allocate memory", "Cannot allocate memory", "pthread_create failed")
_LONGEST_CAUSE, _LONGEST_DETAILS = 2000, 8000


def failure_of(error: BaseException, seat: Seat, step: int) -> RankFailure:
    """Returns the failure record of a rank that an exception ended."""
    try:
        kind, cause = kind_and_cause(error)
    except Exception as second:  # noqa: BLE001  a user's exception may fail to say what it is
        name, reason = type(error).__name__, type(second).__name__
        kind, cause = FailureKind.RAISED, f"{name}, whose message cannot be read ({reason})"
    return RankFailure(
        rank=seat.rank,
        label=seat.label,
        node=seat.node,
        pid=os.getpid(),
        kind=kind,
        cause=scrubbed(cause.strip()[:_LONGEST_CAUSE]),
        step=step,
        details=scrubbed(_shortened("".join(traceback.format_exception(error)))),
    )


def unreported_end(error: BaseException, seat: Seat) -> RankFailure:
    """Returns the failure of a rank that could not tell how it ended, because of this exception."""
    cause = f"{type(error).__name__} kept the rank from telling how it ended; see its log"
    return RankFailure(seat.rank, seat.label, seat.node, os.getpid(), FailureKind.UNKNOWN, cause)


def kind_and_cause(error: BaseException) -> tuple[FailureKind, str]:
    """Returns the kind of failure of an exception, and the cause as text. An exception declares its
    kind (`RayppError.failure_kind`). When that is only a symptom, or when it declares none, the
    exceptions that caused it count, too."""
    declared = error.failure_kind if isinstance(error, RayppError) else None
    text = origin_in_words(error)
    if declared is not None and not declared.traits.symptom:
        return declared, text
    for inner in causes(error):
        if isinstance(inner, OSError) and inner.errno in _FULL:
            return FailureKind.DISK_FULL, f"{inner.filename or 'a file system'} is full: {text}"
    if declared is not None and declared.traits.permanent:
        return declared, text
    for inner in causes(error):
        if isinstance(inner, MemoryError) or any(sign in str(inner) for sign in _NO_HOST_MEMORY):
            return FailureKind.OUT_OF_MEMORY, f"the host is out of memory: {text}"
    if declared is not None:
        return declared, f"{declared.traits.words}: {text}" if declared is FailureKind.STORE_DOWN else text
    return FailureKind.RAISED, text


def _shortened(details: str) -> str:
    """Cuts a traceback in the middle: the root of the causes comes first, the last error last."""
    half = _LONGEST_DETAILS // 2
    return details if len(details) <= _LONGEST_DETAILS else f"{details[:half]}\n…\n{details[-half:]}"
