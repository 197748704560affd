"""Orphaned data of ended attempts in the store: unfinished uploads and uncommitted objects.

The attempt in the key decides what is orphaned, never a clock: once a newer attempt is claimed, an
older one can no longer commit. Data of the newest attempt may belong to a save in progress.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass

from raypp.checkpoint.commit import newest_attempt, read_commit
from raypp.checkpoint.layout import attempt_number, commit_key, step_of, steps_prefix
from raypp.errors import CheckpointError, RayppError
from raypp.records import Event, Reporter, Seat
from raypp.storage import ObjectInfo, ObjectStore, Unfinished

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Leftovers:
    """What may be removed, and what may belong to a save in progress.

    Attributes:
        uploads: Writes that never finished.
        objects: Objects of uncommitted steps.
        under_way: Writes of the newest attempt, which may still be in progress.
    """

    uploads: tuple[Unfinished, ...]
    objects: tuple[ObjectInfo, ...]
    under_way: tuple[Unfinished, ...]

    @property
    def size(self) -> int:
        """Bytes of the objects. A store does not report how much an upload takes."""
        return sum(info.size for info in self.objects)

    def __bool__(self) -> bool:
        return bool(self.uploads or self.objects)

    def __str__(self) -> str:
        return (
            f"{len(self.uploads)} unfinished uploads and {len(self.objects)} uncommitted objects "
            f"({self.size / 1e6:.1f} MB) of earlier attempts"
        )


def find_leftovers(store: ObjectStore, run: str, attempt: int | None = None, *, just_begun: bool = False) -> Leftovers:
    """Finds the data of a run that no attempt will ever commit.

    Args:
        store: Opened at the job's checkpoint.url.
        run: The run's name.
        attempt: The live attempt; None for the newest claimed one.
        just_begun: The live attempt has only just begun. Objects of the attempt right before it,
            above the newest commit, are then left alone: that attempt may have checked for newer
            claims before this one and be about to commit them. They are removed after the next
            commit. Unfinished uploads cannot be part of such a commit.
    """
    living = newest_attempt(store, run) if attempt is None else attempt
    there = list(store.list(steps_prefix(run)))
    steps = {info.key: step for info in there if (step := step_of(run, info.key)) is not None}
    committed = {step for key, step in steps.items() if key == commit_key(run, step)}
    top = max(committed, default=-1)
    objects = []
    for info in there:
        owner, step = _owner(info.key), steps.get(info.key)
        if owner is None or step is None or owner >= living or step in committed:
            continue
        if not (just_begun and owner == living - 1 and step > top):
            objects.append(info)
    uploads: list[Unfinished] = []
    under_way: list[Unfinished] = []
    for upload in store.unfinished(steps_prefix(run)):
        owner, step = _owner(upload.key), step_of(run, upload.key)
        if owner is None or step is None or owner > living:
            continue
        over = owner < living or (step in committed and _attempt_of(store, run, step) == owner)
        (uploads if over else under_way).append(upload)
    return Leftovers(tuple(uploads), tuple(objects), tuple(under_way))


def remove_leftovers(store: ObjectStore, run: str, found: Leftovers) -> None:
    """Removes leftovers; keeps the objects of steps that were committed meanwhile."""
    store.discard(found.uploads)
    steps = {step_of(run, info.key) for info in found.objects}
    now = {step for step in steps if step is not None and store.head(commit_key(run, step)) is not None}
    store.delete([info.key for info in found.objects if step_of(run, info.key) not in now])


def look_after_store(store: ObjectStore, run: str, seat: Seat, reporter: Reporter) -> threading.Thread:
    """Starts a thread that reports the store's limitations and removes leftovers.

    Called at the start of an attempt. Emits the events store_limited and leftovers_removed. Logs a
    failure: saves report their own.
    """

    def look() -> None:
        try:
            for limit in store.limitations():
                details = {"fix": limit.fix}
                reporter.event(
                    Event(
                        "store_limited",
                        f"{limit.key}: {limit.what}",
                        attempt=seat.attempt,
                        rank=seat.rank,
                        details=details,
                    )
                )
            found = find_leftovers(store, run, seat.attempt, just_begun=True)
            if found:
                remove_leftovers(store, run, found)
                keys = [*(upload.key for upload in found.uploads), *(info.key for info in found.objects)]
                reporter.event(
                    Event(
                        "leftovers_removed",
                        f"removed {found}",
                        attempt=seat.attempt,
                        rank=seat.rank,
                        details={"objects": keys[:100], "bytes": found.size},
                    )
                )
        except RayppError as error:
            log.warning("cannot remove leftovers of %s: %s", run, error)

    thread = threading.Thread(target=look, name="raypp-leftovers", daemon=True)
    thread.start()
    return thread


def _owner(key: str) -> int | None:
    """Returns the attempt in whose folder an object lies; None for COMMIT and other keys."""
    return attempt_number(key.rpartition("/")[0])


def _attempt_of(store: ObjectStore, run: str, step: int) -> int | None:
    try:
        return read_commit(store, run, step).attempt
    except CheckpointError:
        return None
