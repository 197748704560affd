"""A stale attempt stalls at any operation of its save and resumes in any phase of its successor."""

import threading
from pathlib import Path
from typing import Any

import pytest
from newest_usable import newest_usable
from test_commit_protocol import RUN, commit_of, put_objects, save

from raypp.errors import RayppError
from raypp.state.checkpoint.commit import claim_attempt, write_commit
from raypp.state.checkpoint.ranged_reads import verify_checkpoint
from raypp.state.checkpoint.retention import prune
from raypp.storage import ObjectStore
from raypp.storage.directory import DirectoryStore

pytestmark = pytest.mark.slow

OPERATIONS = 13
"""More operations than a save has; the last ones stand for an attempt that had ended."""


class StandingStore:
    """A store whose user stalls before its n-th operation until it is released."""

    def __init__(self, store: ObjectStore, stands_at: int) -> None:
        self._store, self._left = store, stands_at
        self.stands, self.awake = threading.Event(), threading.Event()
        self.url = store.url

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._store, name)

        def act(*arguments: Any, **options: Any) -> Any:
            self._left -= 1
            if self._left == 0:
                self.stands.set()
                assert self.awake.wait(60)
            result = real(*arguments, **options)
            return list(result) if name == "list" else result

        return act


class Zombie:
    def __init__(self, store: ObjectStore, stands_at: int) -> None:
        self.store = StandingStore(store, stands_at)
        self.refused: RayppError | None = None
        self.thread = threading.Thread(target=self._live)
        self.thread.start()
        while self.thread.is_alive() and not self.store.stands.wait(0.01):
            pass

    def _live(self) -> None:
        try:
            save(self.store, 20, attempt=1, keep=1)  # type: ignore[arg-type]
        except RayppError as error:
            self.refused = error

    def wake(self) -> None:
        self.store.awake.set()
        self.thread.join()


@pytest.mark.parametrize("step", [15, 20, 25])
@pytest.mark.parametrize("wakes", ["before the claim", "after the objects", "after the commit", "at the end"])
def test_whatever_it_still_does_the_successors_checkpoint_is_whole_and_the_newest(
    tmp_path: Path, step: int, wakes: str
) -> None:
    refused = 0
    for place in range(1, OPERATIONS):
        store = DirectoryStore(tmp_path / f"{place}")
        claim_attempt(store, RUN, 1)
        save(store, 10, attempt=1)
        zombie = Zombie(store, place)
        if wakes == "before the claim":
            zombie.wake()
        claim_attempt(store, RUN, 2)
        records = put_objects(store, step, 2)
        if wakes == "after the objects":
            zombie.wake()
        write_commit(store, commit_of(step, 2, records))
        if wakes == "after the commit":
            zombie.wake()
        prune(store, RUN, 1, newest=step, attempt=2)
        if wakes == "at the end":
            zombie.wake()
        refused += zombie.refused is not None
        assert verify_checkpoint(store, RUN, step) == []
        # Only one case leaves more: if it resumes between its check and its PUT after the successor
        # has finished, it commits step 20 above 15. That checkpoint is complete, or it is reported
        # and skipped.
        newest, problems = newest_usable(store, RUN)
        assert newest is not None
        if wakes != "at the end" or step != 15:
            assert (newest.step, newest.attempt, problems) == (step, 2, [])
        elif newest.attempt == 1:
            assert newest.step == 20 and verify_checkpoint(store, RUN, 20) == []
    assert wakes == "before the claim" or refused >= 3
