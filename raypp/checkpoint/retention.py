"""Which checkpoints stay, and the removal of the others and of what never became one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from raypp.checkpoint.commit import list_checkpoints, read_commit
from raypp.checkpoint.layout import attempt_number, commit_key, step_of, steps_prefix
from raypp.checkpoint.verify import verify_checkpoint
from raypp.errors import CheckpointError
from raypp.storage import ObjectStore


@dataclass(frozen=True)
class Pruned:
    """What was (or would be) removed.

    Attributes:
        steps: Checkpoints that ceased to exist.
        objects: Objects deleted, commits included.
        size: Bytes of these.
    """

    steps: tuple[int, ...]
    objects: tuple[str, ...]
    size: int


def prune(
    store: ObjectStore,
    run: str,
    keep: int,
    *,
    keep_every: int = 0,
    newest: int | None = None,
    attempt: int | None = None,
    dry_run: bool = False,
) -> Pruned:
    """Keeps the newest `keep` checkpoints and removes older ones, and leftovers of attempts that did not commit.

    COMMIT goes first, its objects after it: a checkpoint half removed is none. The newest one is never removed, nor the
    newest whose objects are all there in their full size: when those to be kept are damaged, an older one stays.

    Args:
        store: Opened at the job's checkpoint.url.
        run: The run's name.
        keep: At least 1.
        keep_every: Steps that are multiples of it stay for ever; 0: none does.
        newest: The step the caller just committed. Commits above it by older attempts are void (the caller
            started below them) and go. None: the highest committed step. Objects above `newest` that are not
            committed stay, but those of older attempts: they may belong to a save that is under way.
        attempt: The caller's attempt, with `newest`.
        dry_run: Only say what would go.
    """
    if keep < 1:
        raise ValueError(f"keep must be at least 1, not {keep}")
    committed = [checkpoint.step for checkpoint in list_checkpoints(store, run)]
    if not committed:
        return Pruned((), (), 0)
    top = committed[-1] if newest is None else newest
    void = [step for step in committed if step > top and _is_of_older_attempt(store, run, step, attempt)]
    kept = set([step for step in committed if step <= top][-keep:])
    kept |= {step for step in committed if step > top and step not in void}
    kept |= {step for step in committed if keep_every and step % keep_every == 0 and step not in void}
    if not kept:
        return Pruned((), (), 0)
    # The caller may have been thought dead meanwhile, and a newer attempt be saving: nothing of that one goes.
    kept |= {step for step in committed if step not in kept and _is_of_newer_attempt(store, run, step, attempt)}
    doomed = [step for step in committed if step not in kept]
    if doomed:
        newest_whole = _newest_whole(store, run, [step for step in committed if step not in void])
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
        writer = attempt_number(info.key.rpartition("/")[0]) or 0
        if attempt is not None and writer > attempt:
            continue
        if info.key == commit_key(run, step):
            if step in doomed:
                commits[info.key] = info.size
        elif step in doomed or step <= top or (attempt is not None and 0 < writer < attempt):
            others[info.key] = info.size
    gone = {**commits, **others}
    if not dry_run:
        store.delete(list(commits))
        store.delete(list(others))
    return Pruned(tuple(doomed), tuple(gone), sum(gone.values()))


def _newest_whole(store: ObjectStore, run: str, steps: Sequence[int]) -> int | None:
    """The newest of these steps whose objects are all there in their full size."""
    return next((step for step in reversed(steps) if not verify_checkpoint(store, run, step, every_byte=False)), None)


def _keys_in_use(store: ObjectStore, run: str, steps: Iterable[int]) -> tuple[set[str], set[int]]:
    """The objects that commits name, and the steps whose commit cannot be read (nothing of theirs is touched)."""
    used: set[str] = set()
    unreadable: set[int] = set()
    for step in steps:
        try:
            used.update(record.key for record in read_commit(store, run, step).objects)
        except CheckpointError:
            unreadable.add(step)
    return used, unreadable


def _is_of_newer_attempt(store: ObjectStore, run: str, step: int, attempt: int | None) -> bool:
    if attempt is None:
        return False
    try:
        return read_commit(store, run, step).attempt > attempt
    except CheckpointError:
        return False


def _is_of_older_attempt(store: ObjectStore, run: str, step: int, attempt: int | None) -> bool:
    if attempt is None:
        return False
    try:
        return read_commit(store, run, step).attempt < attempt
    except CheckpointError:
        return True
