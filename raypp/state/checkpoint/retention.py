"""Decides which checkpoints to keep, and removes the others and the leftovers."""

import logging
import math
import re
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from raypp.errors import CheckpointError, RayppError
from raypp.records import Reporter, Seat
from raypp.state.checkpoint.commit import list_checkpoints, newest_attempt, read_commit
from raypp.state.checkpoint.layout import attempt_number, check_run, commit_key, spec_number, step_of, steps_prefix
from raypp.state.checkpoint.ranged_reads import verify_checkpoint
from raypp.storage import ObjectInfo, ObjectStore, Unfinished

_OF_RUN = re.compile(
    r"(?:spec|end|decision|queued)(?:-[0-9]+){0,2}\.json|status\.json|step-[0-9]+/.+"
    r"|(?:attempts|events|files|history|logs|machine|trackers|traces)/.+"
)
"""Keys that a run writes, below its name."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pruned:
    """What was removed, or with `dry_run` would be. `objects`: keys of the deleted objects, commits
    included. `size`: bytes of these objects."""

    steps: tuple[int, ...]
    objects: tuple[str, ...]
    size: int


@dataclass(frozen=True)
class BestOf:
    """Which checkpoints are kept as good. `keep`: how many. `losses`: on held-out data, by step."""

    keep: int
    losses: Mapping[int, float]

    def among(self, steps: Iterable[int]) -> list[int]:
        """Returns the best of these steps, best first; of equal ones, the first."""
        known = [step for step in steps if math.isfinite(self.losses.get(step, math.nan))]
        return sorted(known, key=lambda step: (self.losses[step], step))[: self.keep]


NONE = BestOf(0, {})


def prune(
    store: ObjectStore,
    run: str,
    keep: int,
    *,
    keep_every: int = 0,
    best: BestOf = NONE,
    newest: int | None = None,
    attempt: int | None = None,
    dry_run: bool = False,
) -> Pruned:
    """Keeps the newest `keep` checkpoints; removes older ones and leftovers of ended attempts.

    Deletes COMMIT before its objects: a half-removed checkpoint does not exist. Never removes the
    newest checkpoint, nor the newest one whose objects all exist in full size: if the checkpoints
    to keep are damaged, an older one stays.

    Args:
        keep_every: Checkpoints whose step is a multiple of it are never removed; 0 for none.
        best: Those that are kept for their loss.
        newest: The step that the caller just committed; None for the highest committed step.
            Commits above it by older attempts are void, because the caller started below them, and
            are removed. Uncommitted objects above it stay unless they are of older attempts: they
            may belong to a save in progress.
        attempt: The caller's attempt, with `newest`; None for the newest claimed one, which may
            have fallen back below the newest commit, and be saving there.
    """
    if keep < 1:
        raise ValueError(f"keep must be at least 1, not {keep}")
    # Before the commits are listed: one that appears meanwhile is then not of an ended attempt.
    living = newest_attempt(store, run) if attempt is None else attempt
    committed = [checkpoint.step for checkpoint in list_checkpoints(store, run)]
    if not committed:
        return Pruned((), (), 0)
    top = committed[-1] if newest is None else newest
    above = [step for step in committed if step > top]
    void = [step for step in above if attempt is not None and _attempt_of(store, run, step) < attempt]
    kept = set([step for step in committed if step <= top][-keep:])
    kept |= set(above) - set(void)
    kept |= {step for step in committed if keep_every and step % keep_every == 0 and step not in void}
    kept |= set(best.among(step for step in committed if step <= top))
    if not kept:
        return Pruned((), (), 0)
    if attempt is not None:  # the caller may have been declared dead, and a newer attempt may be saving
        kept |= {step for step in committed if step not in kept and _attempt_of(store, run, step) > attempt}
    doomed = [step for step in committed if step not in kept]
    if doomed:
        valid = (step for step in reversed(committed) if step not in void)
        whole = (step for step in valid if not verify_checkpoint(store, run, step, every_byte=False))
        newest_whole = next(whole, None)
        if newest_whole is not None:
            kept.add(newest_whole)
            doomed = [step for step in doomed if step != newest_whole]

    used, unreadable = _keys_in_use(store, run, kept)
    commits: dict[str, int] = {}
    others: dict[str, int] = {}
    for info in store.list(steps_prefix(run)):
        step = step_of(run, info.key)
        if step is None or info.key in used or step in unreadable:
            continue
        if info.key == commit_key(run, step):
            if step in doomed:
                commits[info.key] = info.size
        elif (step <= top or attempt is not None) and _is_over(
            store, run, committed, living, _owner(info.key) or 0, step
        ):
            others[info.key] = info.size
    gone = {**commits, **others}
    if not dry_run:
        store.delete(list(commits))
        store.delete(list(others))
    return Pruned(tuple(doomed), tuple(gone), sum(gone.values()))


def delete_run(store: ObjectStore, run: str, *, dry_run: bool = False) -> tuple[Pruned, int]:
    """Removes all that a run wrote: its commits first, its spec last. Returns what that was, and
    how many other objects below its name stay, such as those of runs whose store is there."""
    prefix = f"{check_run(run)}/"
    sizes = {info.key: info.size for info in store.list(prefix)}
    own = [key for key in sizes if _OF_RUN.fullmatch(key, len(prefix))]
    commits = [key for key in own if step_of(run, key) is not None and key.endswith("/COMMIT")]
    if not dry_run:
        specs = [key for key in own if spec_number(run, key)]
        store.discard([one for one in store.unfinished(prefix) if _OF_RUN.fullmatch(one.key, len(prefix))])
        for keys in (commits, [key for key in own if key not in {*commits, *specs}], specs):
            store.delete(keys)
    steps = sorted(step for key in commits if (step := step_of(run, key)) is not None)
    return Pruned(tuple(steps), tuple(own), sum(sizes[key] for key in own)), len(sizes) - len(own)


def _keys_in_use(store: ObjectStore, run: str, steps: Iterable[int]) -> tuple[set[str], set[int]]:
    """Returns the keys that commits name, and the steps with unreadable commits (to be kept)."""
    used: set[str] = set()
    unreadable: set[int] = set()
    for step in steps:
        try:
            used.update(record.key for record in read_commit(store, run, step).objects)
        except CheckpointError:
            unreadable.add(step)
    return used, unreadable


def _is_over(store: ObjectStore, run: str, committed: Iterable[int], living: int, owner: int, step: int) -> bool:
    """Returns whether an attempt will surely not commit a step any more: a newer one, `living`, has
    begun, or it has committed this or a higher step. An attempt saves its steps in order. Imported
    weights are of no claimed attempt: `living` is 0."""
    if living and owner != living:
        return owner < living
    return any(_attempt_of(store, run, other) >= owner for other in committed if other >= step)


@dataclass(frozen=True)
class Leftovers:
    """Orphaned data of ended attempts: what may be removed, what may belong to a save in progress.

    The attempt in the key decides, never a clock: once a newer one is claimed, older ones cannot
    commit.

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
    """Finds the data of a run that no attempt will ever commit. `attempt`: the live attempt; None
    for the newest claimed one. `just_begun`: the live attempt has only just begun. Objects of the
    attempt right before it, above the newest commit, are then left alone: that attempt may have
    checked for newer claims before this one and be about to commit them. They are removed after the
    next commit. Unfinished uploads cannot be part of such a commit."""
    living = newest_attempt(store, run) if attempt is None else attempt
    stored = list(store.list(steps_prefix(run)))
    steps = {info.key: step for info in stored if (step := step_of(run, info.key)) is not None}
    committed = {step for key, step in steps.items() if key == commit_key(run, step)}
    top = max(committed, default=-1)
    objects = []
    for info in stored:
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
        over = _is_over(store, run, committed, living, owner, step)
        (uploads if over else under_way).append(upload)
    return Leftovers(tuple(uploads), tuple(objects), tuple(under_way))


def remove_leftovers(store: ObjectStore, run: str, leftovers: Leftovers) -> None:
    """Removes leftovers; keeps the objects of steps that were committed meanwhile."""
    store.discard(leftovers.uploads)
    steps = {step_of(run, info.key) for info in leftovers.objects}
    now = {step for step in steps if step is not None and store.head(commit_key(run, step)) is not None}
    store.delete([info.key for info in leftovers.objects if step_of(run, info.key) not in now])


def look_after_store(store: ObjectStore, run: str, seat: Seat, reporter: Reporter) -> threading.Thread:
    """Starts a thread that reports the store's limitations and removes leftovers: the events
    store_limited and leftovers_removed. Logs a failure: saves report their own."""

    def look() -> None:
        try:
            for limit in store.limitations():
                reporter.event(seat.event("store_limited", f"{limit.key}: {limit.fault}", fix=limit.fix))
            leftovers = find_leftovers(store, run, seat.attempt, just_begun=True)
            if leftovers:
                remove_leftovers(store, run, leftovers)
                keys = [*(upload.key for upload in leftovers.uploads), *(info.key for info in leftovers.objects)]
                reporter.event(
                    seat.event("leftovers_removed", f"removed {leftovers}", objects=keys[:100], bytes=leftovers.size)
                )
        except RayppError as error:
            log.warning("cannot remove leftovers of %s: %s", run, error)

    thread = threading.Thread(target=look, name="raypp-leftovers", daemon=True)
    thread.start()
    return thread


def _owner(key: str) -> int | None:
    """Returns the attempt in whose folder an object lies; None for COMMIT and other keys."""
    return attempt_number(key.rpartition("/")[0])


def _attempt_of(store: ObjectStore, run: str, step: int) -> int:
    try:
        return read_commit(store, run, step).attempt
    except CheckpointError:
        return -1
