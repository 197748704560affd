"""What attempts that are over left in the store: uploads that never ended, objects that never were committed.

Whose they are says the attempt in their key, never a clock: a newer attempt has been claimed, so the older one can
commit nothing more. What belongs to the newest attempt may be a save that is under way.
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
    """What can go, and what cannot be told apart from a save that is under way.

    Attributes:
        uploads: Writes that never ended.
        objects: Objects of steps that are not committed.
        under_way: Writes of the newest attempt, which may go on.
    """

    uploads: tuple[Unfinished, ...]
    objects: tuple[ObjectInfo, ...]
    under_way: tuple[Unfinished, ...]

    @property
    def size(self) -> int:
        """Bytes of the objects (a store does not say how much of an upload it holds)."""
        return sum(info.size for info in self.objects)

    def __bool__(self) -> bool:
        return bool(self.uploads or self.objects)

    def __str__(self) -> str:
        return (
            f"{len(self.uploads)} unfinished uploads and {len(self.objects)} uncommitted objects "
            f"({self.size / 1e6:.1f} MB) of earlier attempts"
        )


def find_leftovers(store: ObjectStore, run: str, attempt: int | None = None, *, just_begun: bool = False) -> Leftovers:
    """Looks through a run for what no attempt will ever commit.

    Args:
        store: Opened at the job's checkpoint.url.
        run: The run's name.
        attempt: The one that lives; None: the newest claimed.
        just_begun: It began this moment. Then objects of the attempt right before it, above the newest commit, are
            left alone: that one may be about to commit them, having looked before the new claim. They go after the
            next commit. An upload cannot be part of what is about to be committed.
    """
    living = newest_attempt(store, run) if attempt is None else attempt
    there = list(store.list(steps_prefix(run)))
    committed = {step for info in there if (step := step_of(run, info.key)) and info.key == commit_key(run, step)}
    top = max(committed, default=0)
    objects = []
    for info in there:
        owner, step = _owner(info.key), step_of(run, info.key)
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
    """Removes them; steps that were committed meanwhile keep their objects."""
    store.discard(found.uploads)
    steps = {step_of(run, info.key) for info in found.objects}
    now = {step for step in steps if step is not None and store.head(commit_key(run, step)) is not None}
    store.delete([info.key for info in found.objects if step_of(run, info.key) not in now])


def look_after_store(store: ObjectStore, run: str, seat: Seat, reporter: Reporter) -> threading.Thread:
    """At the start of an attempt, in a thread: tells what the store cannot do, and removes leftovers.

    Events: store_limited, leftovers_removed. A failure is logged; saves will tell of their own.
    """

    def look() -> None:
        try:
            for limit in store.limitations():
                told = {"fix": limit.fix}
                reporter.event(
                    Event(
                        "store_limited",
                        f"{limit.key}: {limit.what}",
                        attempt=seat.attempt,
                        rank=seat.rank,
                        details=told,
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
            log.warning("leftovers of %s were not removed: %s", run, error)

    thread = threading.Thread(target=look, name="raypp-leftovers", daemon=True)
    thread.start()
    return thread


def _owner(key: str) -> int | None:
    """The attempt in whose folder an object lies; None for COMMIT and all that is not of a step."""
    return attempt_number(key.rpartition("/")[0])


def _attempt_of(store: ObjectStore, run: str, step: int) -> int | None:
    try:
        return read_commit(store, run, step).attempt
    except CheckpointError:
        return None
