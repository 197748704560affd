"""Two attempts of one run at once, and one that dies at any request: real server, real saver."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from saving import PART, OneRank, committed, newest
from seaweed import BUCKET

from raypp.control.clusters.seaweed import SeaweedServer
from raypp.state.checkpoint.commit import read_commit
from raypp.state.checkpoint.layout import commit_key, rank_key
from raypp.state.checkpoint.ranged_reads import verify_checkpoint
from raypp.storage.s3 import S3Store

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


def test_of_two_attempts_at_once_the_newer_commits_and_the_older_learns_why_not(seaweed_server: SeaweedServer) -> None:
    start = threading.Barrier(2)

    def live() -> OneRank:
        store = seaweed_server.store(BUCKET, "race", part_bytes=PART)
        start.wait()
        rank = OneRank(store, "run")  # claims the attempt
        start.wait()
        for step in (1, 2, 3):
            rank.save_and_wait(step)
        return rank

    with ThreadPoolExecutor() as pool:
        ranks = [one.result() for one in [pool.submit(live) for _ in range(2)]]
    older, newer = sorted(ranks, key=lambda rank: rank.attempt)
    assert (older.attempt, newer.attempt) == (1, 2)
    assert newer.reporter.kinds() == ["committed"] * 3
    assert older.reporter.kinds() == ["save_failed"]
    assert all("attempt 1 is over: attempt 2 has begun" in event.message for event in older.reporter.events)
    store = newer.store
    assert committed(store, "run") == [1, 2, 3]
    for step in (1, 2, 3):
        assert read_commit(store, "run", step).attempt == 2
        assert verify_checkpoint(store, "run", step) == []


class Died(BaseException):
    """Stands for the death of the process."""


class Mortal:
    """A process that dies at its n-th request, which the server may carry out (`answered`)."""

    def __init__(self, store: S3Store, at: int, answered: bool) -> None:
        self._left, self._lock, self.dead = at, threading.Lock(), False
        events = store._clients.current.meta.events
        events.register("before-send.s3", self._pass if answered else self._count)
        events.register("before-parse.s3", self._count if answered else self._pass)

    def _pass(self, **_: Any) -> None:
        if self.dead:
            raise Died

    def _count(self, **_: Any) -> None:
        with self._lock:
            self._left -= 1
            self.dead = self.dead or self._left == 0
        self._pass()


@pytest.mark.slow
@pytest.mark.parametrize("answered", [False, True])
def test_a_death_at_any_request_leaves_the_old_or_the_new_state_whole(
    seaweed_server: SeaweedServer, answered: bool
) -> None:
    """Between parts, at a completion, at the check of the claim, at COMMIT, in retention."""
    seen, at = set(), 0
    while True:
        at += 1
        prefix = f"death-{answered}-{at}"
        first = OneRank(seaweed_server.store(BUCKET, prefix, part_bytes=PART), "run", keep=1)
        assert first.save_and_wait(10)
        mortal = Mortal(first.store, at, answered)  # type: ignore[arg-type]
        first.save(20)
        first.saver._thread.join()  # type: ignore[union-attr]
        store = seaweed_server.store(BUCKET, prefix, part_bytes=PART)
        step, damaged = newest(store, "run")
        assert step is not None and damaged == []
        seen.add(step)
        assert set(first.reporter.kinds()) == {"committed"}, "the dead say nothing"
        successor = OneRank(store, "run", keep=1)
        assert successor.save_and_wait(30)
        left = {info.key for info in store.list("run/step-")}
        assert left == {commit_key("run", 30), rank_key("run", 30, 2, 0)}
        if not mortal.dead:
            break
        store.delete([info.key for info in store.list("")])
    assert at > 8
    assert seen == {10, 20}
