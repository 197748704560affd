"""Finds the newest intact checkpoint of a run by reading every byte, as a reference for the tests
of commits."""

from __future__ import annotations

from dataclasses import dataclass

from raypp.checkpoint.commit import Commit, list_checkpoints, read_commit
from raypp.checkpoint.ranged_reads import verify_checkpoint
from raypp.errors import Problem
from raypp.storage import ObjectStore


@dataclass(frozen=True)
class Rejected:
    """A committed checkpoint that cannot be used, and the problems, which name the objects."""

    step: int
    problems: tuple[Problem, ...]

    def __str__(self) -> str:
        return f"step {self.step}: " + "; ".join(f"{problem.key}: {problem.fault}" for problem in self.problems)


@dataclass(frozen=True)
class Usable:
    """The newest usable checkpoint, and the newer ones that are not usable.

    Attributes:
        commit: The usable checkpoint's commit; None if there is none.
        rejected: Unusable checkpoints, newest first.
    """

    commit: Commit | None
    rejected: tuple[Rejected, ...]


def newest_usable(store: ObjectStore, run: str, *, verify: bool = True) -> Usable:
    """Finds the newest intact checkpoint.

    Args:
        store: Opened at the job's checkpoint.url.
        run: The run's name.
        verify: Reads every byte again; otherwise checks only existence and sizes.
    """
    rejected: list[Rejected] = []
    for checkpoint in reversed(list_checkpoints(store, run)):
        problems = verify_checkpoint(store, run, checkpoint.step, every_byte=verify)
        if not problems:
            return Usable(read_commit(store, run, checkpoint.step), tuple(rejected))
        rejected.append(Rejected(checkpoint.step, tuple(problems)))
    return Usable(None, tuple(rejected))
