"""Finds the newest intact checkpoint of a run by reading every byte, as a reference."""

from raypp.errors import Problem
from raypp.state.checkpoint.commit import Commit, list_checkpoints, read_commit
from raypp.state.checkpoint.ranged_reads import verify_checkpoint
from raypp.storage import ObjectStore


def newest_usable(store: ObjectStore, run: str) -> tuple[Commit | None, list[Problem]]:
    """Returns the commit, and the problems of newer checkpoints, which name the objects."""
    problems: list[Problem] = []
    for checkpoint in reversed(list_checkpoints(store, run)):
        found = verify_checkpoint(store, run, checkpoint.step)
        if not found:
            return read_commit(store, run, checkpoint.step), problems
        problems += found
    return None, problems
