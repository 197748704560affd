"""Verifies that every byte of a checkpoint exists and is the one that was written."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from raypp.checkpoint.commit import ObjectRecord, read_commit
from raypp.errors import CheckpointError, Problem
from raypp.storage import NotFound, ObjectStore

_READ_BYTES = 16 << 20
_READERS = 4
_ADVICE = "use an older checkpoint (a resume does so by itself); `raypp checkpoints list` shows them"


def verify_checkpoint(
    store: ObjectStore,
    run: str,
    step: int,
    *,
    every_byte: bool = True,
    progress: Callable[[int], None] = lambda _bytes: None,
) -> list[Problem]:
    """Checks one checkpoint.

    Args:
        store: Opened at the job's checkpoint.url.
        run: The run's name.
        step: A committed step.
        every_byte: Reads all objects again and compares their SHA-256; otherwise compares sizes.
        progress: Called with the number of bytes read since its last call, from several threads.

    Returns:
        One problem per object that is missing, torn or corrupt, in rank order; empty if there is
        none.
    """
    try:
        commit = read_commit(store, run, step)
    except CheckpointError as error:
        return list(error.problems)

    def check(record: ObjectRecord) -> Problem | None:
        return verify_object(store, record, every_byte, progress)

    with ThreadPoolExecutor(_READERS) as pool:
        return [problem for problem in pool.map(check, commit.objects) if problem is not None]


def verify_object(
    store: ObjectStore, record: ObjectRecord, every_byte: bool, progress: Callable[[int], None] = lambda _bytes: None
) -> Problem | None:
    """Returns the problem of one object, or None. Reads it in pieces of 16 MiB."""
    info = store.head(record.key)
    if info is None:
        return Problem(record.key, "is missing", _ADVICE)
    if info.size != record.size:
        return Problem(record.key, f"has {info.size} bytes, but {record.size} were written", _ADVICE)
    if not every_byte:
        return None
    try:
        # A mismatch is read once more: the bytes may have been damaged in transit.
        if _sha256(store, record, progress) == record.sha256 or _sha256(store, record) == record.sha256:
            return None
    except NotFound:
        return Problem(record.key, "disappeared while it was read", _ADVICE)
    return Problem(record.key, "is corrupt: its SHA-256 is not the one that was committed", _ADVICE)


def _sha256(store: ObjectStore, record: ObjectRecord, progress: Callable[[int], None] = lambda _bytes: None) -> str:
    digest = hashlib.sha256()
    for start in range(0, record.size, _READ_BYTES):
        piece = store.get(record.key, start, min(start + _READ_BYTES, record.size))
        digest.update(piece)
        progress(len(piece))
    return digest.hexdigest()
