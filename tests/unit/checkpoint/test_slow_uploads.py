"""Ranks with slow uploads are waited for while they progress. Messages go through a TCPStore."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from collecting_reporter import CollectingReporter
from stand_in_clock import StandInClock, wait_until
from test_save_and_load import ONE, RUN, adamw, model
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from raypp.records import Coordinates, Seat
from raypp.state.checkpoint import announce
from raypp.state.checkpoint import save as save_module
from raypp.state.checkpoint.announce import Announcements
from raypp.state.checkpoint.commit import list_checkpoints, read_commit
from raypp.state.checkpoint.save import CheckpointSaver
from raypp.storage.directory import DirectoryStore
from raypp.storage.rate_limit import Pace

TIMEOUT_S = 1.0
"""Of `Link.clock`."""


class Link(Announcements):
    """Shows whether a rank waits, and counts how often it saw progress of those it waits for."""

    clock: StandInClock
    waits = False
    seen = 0

    def wait_all(self, step: int, ranks: Any, timeout_s: float, stopped: Any = lambda: False, *more: Any) -> Any:
        def asked() -> bool:
            self.waits = True
            return bool(stopped())

        return super().wait_all(step, ranks, timeout_s, asked, *more)

    def _look(self, *about: Any) -> bool:
        changed = super()._look(*about)
        self.seen += changed
        return changed

    def progresses(self, step: int, rank: int, value: int) -> None:
        """Tells progress, a little before it would be late, and waits until it is seen."""
        wait_until(lambda: self.waits)
        before = self.seen
        self.progress(step, rank, value)
        self.clock.now += 0.4 * TIMEOUT_S
        wait_until(lambda: self.seen > before)


@pytest.fixture
def announcements(monkeypatch: pytest.MonkeyPatch) -> Iterator[Link]:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    Link.clock = StandInClock(passes=False)
    monkeypatch.setattr(announce, "time", Link.clock)
    yield Link(server, 1)
    del server


def save(
    root: Path, announcements: Link, rank: int, store: Any = None, timeout_s: float = TIMEOUT_S, **more: Any
) -> tuple[CheckpointSaver, CollectingReporter]:
    reporter, stage = CollectingReporter(), model()
    seat = Seat(RUN, 1, rank, 2, Coordinates(), ONE)
    saver = CheckpointSaver(
        store or DirectoryStore(root), RUN, {}, seat, announcements, reporter, 9, commit_timeout_s=timeout_s, **more
    )
    saver.save(1, [stage], adamw(stage), {})
    return saver, reporter


def test_a_rank_that_progresses_is_waited_for_and_its_part_is_committed(tmp_path: Path, announcements: Link) -> None:
    saver, reporter = save(tmp_path, announcements, 0)
    for sent in range(1, 11):
        announcements.progresses(1, 1, sent)
    announcements.announce(1, 1, {"object": None, "facts": {"stall_s": 0.0, "upload_s": 2.5}})
    assert saver.finish() == 1
    assert reporter.kinds() == ["committed"]


def give_up(saver: CheckpointSaver, link: Link) -> int | None:
    """Lets the time pass until the save is given up; returns its step if it was committed."""
    while saver.busy:
        link.clock.now += 0.1 * TIMEOUT_S
        link.clock.sleep(0.0)
    return saver.wait()


def test_the_server_keeps_no_message_of_a_save_that_is_over(tmp_path: Path, announcements: Link) -> None:
    saver, _ = save(tmp_path, announcements, 0)
    announcements.announce(1, 1, {"object": None, "facts": {"stall_s": 0.0, "upload_s": 2.5}})
    assert saver.finish() == 1
    with pytest.raises(TimeoutError, match=r"ranks \[0, 1\]"):
        announcements.wait_all(1, [0, 1], 60.0, stopped=lambda: True)


def test_a_rank_that_stops_progressing_is_given_up_and_named(tmp_path: Path, announcements: Link) -> None:
    saver, reporter = save(tmp_path, announcements, 0)
    for sent in range(1, 4):
        announcements.progresses(1, 1, sent)
    announcements.progress(1, 1, 3)
    assert give_up(saver, announcements) is None
    assert "ranks [1] did not report in time" in reporter.events[0].message
    assert list_checkpoints(DirectoryStore(tmp_path), RUN) == []


class Marks(CollectingReporter):
    """Counts how often the rank says that it waits for its last save."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = 0

    def phase(self, name: str, detail: str = "", reached: object = None) -> None:
        self.waits += "waits for the save" in detail


def test_a_rank_that_waits_for_its_last_save_marks_progress_while_there_is_any(
    tmp_path: Path, announcements: Link
) -> None:
    """Without these marks the controller would take the wait for a hang."""
    saver, _ = save(tmp_path, announcements, 0)
    marks = Marks()
    saver._reporter = marks
    waiting = threading.Thread(target=saver._wait_for_last, args=(2,), daemon=True)
    waiting.start()
    wait_until(lambda: marks.waits > 0)
    for sent in range(1, 6):
        before = marks.waits
        announcements.progresses(1, 1, sent)
        wait_until(lambda before=before: marks.waits > before)  # type: ignore[misc]
    marked = marks.waits
    give_up(saver, announcements)
    waiting.join()
    assert marks.waits == marked, "none for the time without progress"
    assert marks.kinds()[-1] == "save_failed"


class SlowStore(DirectoryStore):
    """After each piece time passes, and the rank `waiting` sees the progress of `teller`."""

    def __init__(self, root: Path, waiting: Link, teller: int) -> None:
        super().__init__(root)
        self._waiting, self._teller = waiting, teller
        self.pieces = 0

    def put_stream(self, key: str, chunks: Any, size: int) -> None:
        def seen() -> Any:
            wait_until(lambda: self._waiting.waits)
            progress, before = self._progress(), self._waiting.seen
            for chunk in chunks:
                yield chunk
                wait_until(lambda progress=progress: self._progress() != progress)  # type: ignore[misc]
                Link.clock.now += 0.4 * TIMEOUT_S
                wait_until(lambda before=before: self._waiting.seen > before)  # type: ignore[misc]
                self.pieces += 1
                progress, before = self._progress(), self._waiting.seen  # nothing is told before the next piece

        super().put_stream(key, seen(), size)

    def _progress(self) -> bytes:
        key = self._waiting._progress_key(1, self._teller)
        return self._waiting._store.get(key) if self._waiting._store.check([key]) else b""


def test_a_slow_upload_of_either_rank_delays_the_commit_and_both_learn_of_it(
    tmp_path: Path, announcements: Link
) -> None:
    """The upload lasts longer than ranks wait for one that is silent."""
    for slow in (0, 1):
        root = tmp_path / str(slow)
        links = [Link(announcements._store, slow) for _ in range(2)]
        stores = {slow: SlowStore(root, links[1 - slow], 1 if slow else save_module._OUTCOME)}
        savers = [save(root, links[rank], rank, store=stores.get(rank), pace=Pace(1e6)) for rank in (0, 1)]
        assert [savers[rank][0].finish() for rank in (1 - slow, slow)] == [1, 1]
        assert stores[slow].pieces > 3, "more than the time for which ranks wait"
        assert len(read_commit(DirectoryStore(root), RUN, 1).objects) == 2
        assert savers[0][1].kinds() == ["committed"]


class HeldStore(DirectoryStore):
    """Sends no more after the first bytes, until it is released."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.go = threading.Event()

    def put_stream(self, key: str, chunks: Any, size: int) -> None:
        def held() -> Any:
            for chunk in chunks:
                yield chunk
                assert self.go.wait(60)

        super().put_stream(key, held(), size)


def test_an_upload_that_stands_still_is_no_progress(tmp_path: Path, announcements: Link) -> None:
    held = HeldStore(tmp_path)
    slow, _ = save(tmp_path, announcements, 1, store=held)
    saver, reporter = save(tmp_path, announcements, 0)
    try:
        assert give_up(saver, announcements) is None
        assert "ranks [1] did not report in time" in reporter.events[0].message
    finally:
        held.go.set()
    assert slow.wait() is None
