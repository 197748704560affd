"""A failed save leaves no objects that would make the next one fail on a nearly full disk."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from collecting_reporter import CollectingReporter
from in_one_process import InOneProcess
from stand_in_clock import wait_until
from test_save_and_load import RUN, adamw, model, saved, saver
from torch import nn

from raypp.state.checkpoint.commit import Commit, list_checkpoints
from raypp.state.checkpoint.layout import commit_key, rank_key, steps_prefix
from raypp.state.checkpoint.ranged_reads import verify_checkpoint
from raypp.storage import StoreError
from raypp.storage.directory import DirectoryStore


class SmallDisk(DirectoryStore):
    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.room = 1 << 40
        self._one_at_a_time = threading.Lock()

    def put_stream(self, key: str, chunks: Any, size: int) -> None:
        with self._one_at_a_time:
            if size + sum(info.size for info in self.list(steps_prefix(RUN)) if info.key != key) > self.room:
                raise StoreError("the disk is full")
            super().put_stream(key, chunks, size)


class Pair:
    def __init__(self, store: DirectoryStore) -> None:
        self.reporter, talk = CollectingReporter(), InOneProcess()
        self.savers, self.stages = [], []
        for rank in range(2):
            torch.manual_seed(rank)
            self.savers.append(saver(store, self.reporter, rank=rank, world=2, talk=talk, pp=2, commit_timeout_s=60))
            self.stages.append(nn.ModuleDict({f"layer{rank}": nn.Linear(64, 64)}))
        self._optimizers = [adamw(stage) for stage in self.stages]

    def begin(self, rank: int, step: int) -> None:
        self.savers[rank].save(step, [self.stages[rank]], self._optimizers[rank], {})

    def wait(self) -> list[int | None]:
        with ThreadPoolExecutor() as pool:  # each waits for what the other announces
            return list(pool.map(lambda saver: saver.wait(), self.savers))


def test_an_object_of_a_save_that_another_rank_failed_makes_room_for_the_next(tmp_path: Path) -> None:
    store = SmallDisk(tmp_path)
    pair = Pair(store)
    pair.begin(0, 1)
    wait_until(lambda: store.head(rank_key(RUN, 1, 1, 0)))
    left = store.head(rank_key(RUN, 1, 1, 0))
    assert left is not None
    store.room = left.size
    pair.begin(1, 1)
    assert pair.wait() == [None, None]
    assert any("the disk is full" in event.message for event in pair.reporter.events)
    store.room = int(2.5 * left.size)  # two objects; three with the one that was left
    for rank in (0, 1):
        pair.begin(rank, 2)
    assert pair.wait() == [2, 2]
    assert verify_checkpoint(store, RUN, 2) == []


def test_what_a_rank_left_goes_even_if_the_next_saves_fail_too(tmp_path: Path) -> None:
    store = SmallDisk(tmp_path)
    pair = Pair(store)
    for step in (1, 2, 3):
        store.room = 1 << 40
        pair.begin(0, step)
        wait_until(lambda step=step: store.head(rank_key(RUN, step, 1, 0)))
        store.room = 0
        pair.begin(1, step)
        assert pair.wait() == [None, None]
    assert [info.key for info in store.list(steps_prefix(RUN))] == [rank_key(RUN, 3, 1, 0)]


@pytest.mark.parametrize(("committed_by", "stays"), [(1, True), (2, False), (None, True)])
def test_an_object_that_some_commit_may_name_stays(tmp_path: Path, committed_by: int | None, stays: bool) -> None:
    store, key = SmallDisk(tmp_path), rank_key(RUN, 1, 1, 0)
    pair = Pair(store)
    pair.begin(0, 1)
    wait_until(lambda: store.head(key))
    store.room = 0
    pair.begin(1, 1)
    assert pair.wait() == [None, None]
    commit = Commit(RUN, 1, committed_by or 0, {}, {}, {}, ())
    store.put(commit_key(RUN, 1), commit.to_bytes() if committed_by else b"{")
    for rank in (0, 1):
        pair.begin(rank, 2)
    assert pair.wait() == [None, None]
    assert (store.head(key) is not None) == stays


class LostCommits(DirectoryStore):
    """Accepts COMMITs without an answer, and lets them appear later."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.on_its_way: dict[str, Any] = {}

    def put(self, key: str, data: Any, *, if_absent: bool = False) -> None:
        if key.endswith("COMMIT"):
            self.on_its_way.setdefault(key, data)
            raise StoreError("no answer")
        super().put(key, data, if_absent=if_absent)


def test_the_objects_of_a_commit_that_may_still_appear_stay(tmp_path: Path) -> None:
    store, stage = LostCommits(tmp_path), model()
    saving, optimizer = saver(store, CollectingReporter()), adamw(stage)
    for step in (1, 2):
        saving.save(step, [stage], optimizer, {})
        assert saving.wait() is None
    DirectoryStore.put(store, commit_key(RUN, 1), store.on_its_way[commit_key(RUN, 1)], if_absent=True)
    assert verify_checkpoint(store, RUN, 1) == []


def test_a_save_that_was_refused_because_the_step_is_committed_removes_nothing(tmp_path: Path) -> None:
    store, reporter = DirectoryStore(tmp_path), CollectingReporter()
    stage, optimizer = saved(store)
    saving = saver(store, reporter)
    for step in (3, 4):
        saving.save(step, [stage], optimizer, {})
        saving.wait()
    assert reporter.kinds()[0] == "save_failed"
    assert [checkpoint.step for checkpoint in list_checkpoints(store, RUN)] == [3, 4]
    assert verify_checkpoint(store, RUN, 3) == []
