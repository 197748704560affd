"""Ranks whose uploads take longer than the others wait: they are waited for while they progress.
All messages go through a real TCPStore."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_save_and_load import ONE, RUN, adamw, model
from told import Told
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from raypp.checkpoint.announce import StoreAnnouncements
from raypp.checkpoint.commit import list_checkpoints, read_commit
from raypp.checkpoint.save import CheckpointSaver
from raypp.records import Coordinates, Seat
from raypp.storage.directory import DirectoryStore
from raypp.storage.rate_limit import Pace

TIMEOUT_S = 1.0


@pytest.fixture
def announcements() -> Iterator[StoreAnnouncements]:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield StoreAnnouncements(server, 1)
    del server


def save(
    root: Path,
    announcements: StoreAnnouncements,
    rank: int,
    store: Any = None,
    timeout_s: float = TIMEOUT_S,
    **more: Any,
) -> tuple[CheckpointSaver, Told]:
    """Begins to save step 1 on a rank of two."""
    told, stage = Told(), model()
    seat = Seat(RUN, 1, rank, 2, Coordinates(), ONE)
    saver = CheckpointSaver(
        store or DirectoryStore(root), RUN, {}, seat, announcements, told, 9, commit_timeout_s=timeout_s, **more
    )
    saver.save(1, [stage], adamw(stage), {})
    return saver, told


def test_a_rank_that_progresses_is_waited_for_and_its_part_is_committed(
    tmp_path: Path, announcements: StoreAnnouncements
) -> None:
    saver, told = save(tmp_path, announcements, 0)
    for sent in range(25):
        announcements.progress(1, 1, sent)
        time.sleep(0.1)
    announcements.announce(1, 1, {"object": None, "facts": {"stall_s": 0.0, "upload_s": 2.5}})
    assert saver.finish() == 1
    with pytest.raises(TimeoutError, match=r"ranks \[0, 1\]"):  # the server keeps no message of a save that is over
        announcements.wait_all(1, [0, 1], 0.1)
    assert told.kinds() == ["committed"] and told.events[0].details["seconds"] > 2 * TIMEOUT_S


def test_a_rank_that_stops_progressing_is_given_up_and_named(tmp_path: Path, announcements: StoreAnnouncements) -> None:
    saver, told = save(tmp_path, announcements, 0)
    for sent in range(8):
        announcements.progress(1, 1, sent)
        time.sleep(0.1)
    while saver.busy:
        announcements.progress(1, 1, 7)
        time.sleep(0.1)
    assert saver.wait() is None
    assert "ranks [1] did not report in time" in told.events[0].message
    assert list_checkpoints(DirectoryStore(tmp_path), RUN) == []


class Marks(Told):
    """Counts how often the rank says that it waits for its last save."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = 0

    def phase(self, name: str, detail: str = "") -> None:
        self.waits += "waits for the save" in detail


def test_a_rank_that_waits_for_its_last_save_marks_progress_while_there_is_any(
    tmp_path: Path, announcements: StoreAnnouncements
) -> None:
    """Without these marks the controller would take the wait for a hang."""

    def upload() -> None:
        for sent in range(10):
            announcements.progress(1, 1, sent)
            time.sleep(0.1)
        time.sleep(1.0)  # longer than it is waited for

    saver, _ = save(tmp_path, announcements, 0)
    marks = Marks()
    saver._reporter = marks
    other = threading.Thread(target=upload, daemon=True)
    other.start()
    saver._wait_for_last(2)
    seconds = marks.events[-1].details["seconds"]
    assert 3 <= marks.waits <= 12, "none for the time without progress"
    assert seconds > 1.0
    other.join()


class HeldStore(DirectoryStore):
    """Sends no more after the first bytes, until it is released."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.go = threading.Event()

    def put_stream(self, key: str, chunks: Any, size: int) -> None:
        def held() -> Any:
            for chunk in chunks:
                yield chunk
                assert self.go.wait(30)

        super().put_stream(key, held(), size)


def test_a_slow_upload_of_either_rank_delays_the_commit_and_both_learn_of_it(
    tmp_path: Path, announcements: StoreAnnouncements
) -> None:
    """The upload lasts twice as long as ranks wait for one that is silent."""
    for slow in (0, 1):
        root = tmp_path / str(slow)
        size = sum(part.numel() * part.element_size() for part in model().parameters())
        pace = {slow: Pace(size / (2 * TIMEOUT_S))}
        link = StoreAnnouncements(announcements._store, slow)
        savers = [save(root, link, rank, pace=pace.get(rank)) for rank in (0, 1)]
        assert [saver.finish() for saver, _ in savers] == [1, 1]
        assert len(read_commit(DirectoryStore(root), RUN, 1).objects) == 2
        (done,) = savers[0][1].events
        assert done.details["upload_s"] > 1.5 * TIMEOUT_S


def test_an_upload_that_stands_still_is_no_progress(tmp_path: Path, announcements: StoreAnnouncements) -> None:
    held = HeldStore(tmp_path)
    slow, _ = save(tmp_path, announcements, 1, store=held)
    saver, told = save(tmp_path, announcements, 0)
    try:
        assert saver.wait() is None
        assert "ranks [1] did not report in time" in told.events[0].message
    finally:
        held.go.set()
    assert slow.wait() is None
