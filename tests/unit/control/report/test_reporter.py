"""A rank's reporter and its buffer: what reaches controller and store, also without a log."""

import io
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stand_in_clock import StandInClock

from raypp.control.hang_watch import HangWatch
from raypp.control.protocol import BatchAnswer, ReportBatch
from raypp.control.report import reporter as reporter_module
from raypp.control.report.reporter import ControllerReporter, LogTail, ReportBuffer
from raypp.control.seats import Rank
from raypp.records import Coordinates, Event, Requests, Seat

SEAT = Seat("run", 1, 1, 2, Coordinates(), Coordinates(1, 1, 1, 1, 1))


def test_a_rank_whose_log_is_on_a_full_disk_reports_on_after_its_controller_was_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """First nobody answers, which is a line for the log."""
    tried: list[ReportBatch] = []
    taken: list[ReportBatch] = []

    def direct(batch: ReportBatch) -> BatchAnswer:
        tried.append(batch)
        if len(tried) == 1:
            raise ConnectionError("away")
        taken.append(batch)
        return BatchAnswer(Requests(), "second")

    monkeypatch.setattr(ControllerReporter, "_sent", lambda _self, batch: direct(batch))
    monkeypatch.setattr(reporter_module, "_INTERVAL_S", 0.01)
    monkeypatch.setattr(reporter_module, "_AWAY_S", 0.01)
    full = io.TextIOWrapper(cast(Any, io.FileIO("/dev/full", "w")), line_buffering=True)
    monkeypatch.setattr(sys, "stderr", full)
    monkeypatch.setattr(sys, "stdout", full)
    with ControllerReporter(None, SEAT, ()) as reporter:
        reporter.event(Event("lived", "here", attempt=1, rank=1))
        end = time.monotonic() + 60.0
        while len(taken) < 3 and time.monotonic() < end:
            time.sleep(0.01)
        print("half a line", end="")
    assert len(taken) >= 3, "the thread that reports has ended"
    assert [event.kind for batch in taken for event in batch.events] == ["lived"]


class Device:
    """Comes to as many of its marks as the test lets it."""

    def __init__(self) -> None:
        self.marks = self.done = 0
        self.broken = False

    def mark(self) -> Callable[[], bool]:
        self.marks += 1
        number = self.marks

        def reached() -> bool:
            if self.broken:
                raise RuntimeError("CUDA error: unspecified launch failure")
            return self.done >= number

        return reached


def test_a_rank_reports_where_its_device_is_and_not_what_its_host_has_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = StandInClock()
    monkeypatch.setattr(reporter_module, "time", clock)
    monkeypatch.setattr(reporter_module, "inside", lambda _thread: "all_reduce")
    reporter, device = ControllerReporter(None, SEAT, ()), Device()

    def heartbeat() -> tuple[str, float, int, str]:
        batch = reporter._batch()
        return batch.phase, batch.idle_s, batch.reached, batch.inside

    reporter.phase("load")
    for action in ("1F0 waits", "1F0", "1B0", "sum"):
        reporter.phase("step", action, device.mark())
    assert heartbeat()[::2] == ("load", 0), "it still does what came before its first mark"
    device.done = 2
    heartbeat()
    clock.advance(70)
    assert heartbeat() == ("step 1F0", 70, 2, "")
    device.done = 4
    assert heartbeat() == ("step sum", 0, 0, ""), "the device came there just now, however long its host has been there"
    clock.advance(5)
    assert heartbeat() == ("step sum", 5, 0, "all_reduce")
    reporter.phase("step", "2 read")
    assert heartbeat()[::2] == ("step 2 read", 0)


def test_a_device_that_has_failed_leaves_what_the_host_says(monkeypatch: pytest.MonkeyPatch) -> None:
    reporter, device = ControllerReporter(None, SEAT, ()), Device()
    reporter.phase("step", "1F0", device.mark())
    device.broken = True
    assert reporter._batch().phase == "step 1F0" and reporter._batch().reached == 0


def test_a_trail_that_nobody_looks_at_stays_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporter_module, "_LONGEST_TRAIL", 10)
    reporter, device = ControllerReporter(None, SEAT, ()), Device()
    for _ in range(100):
        device.done = device.marks
        reporter.phase("step", "1F0", device.mark())
    assert len(reporter._trail._queued) <= 10
    assert reporter._batch().reached == 99


def _answer(life: int, durable: int = 0) -> BatchAnswer:
    return BatchAnswer(Requests(), str(life), durable)


def test_what_is_in_the_store_is_not_kept_and_what_is_not_is_sent_to_the_next_life() -> None:
    buffer = ReportBuffer(SEAT)
    for number in range(3):
        buffer.add_event(Event("one", str(number)))
        buffer.sent(buffer.next_batch("step", 0.0), _answer(1, durable=number))
    left = buffer.unwritten()
    assert left is not None and [event.message for event in left.events] == ["2"]
    buffer.sent(buffer.next_batch("step", 0.0), _answer(2))
    assert [event.message for event in buffer.next_batch("step", 0.0).events] == ["2"]


def test_what_nobody_took_waits_before_what_is_newer_and_the_oldest_go_first() -> None:
    buffer = ReportBuffer(SEAT, most=3)
    buffer.add_event(Event("one", "0"))
    batch = buffer.next_batch("step", 0.0)
    buffer.add_event(Event("one", "1"))
    buffer.requeue(batch)
    assert [event.message for event in buffer.next_batch("step", 0.0).events] == ["0", "1"]
    for number in range(5):
        buffer.add_event(Event("one", str(number)))
    assert [event.message for event in buffer.next_batch("step", 0.0).events] == ["2", "3", "4"]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(("event", "report", "away", "write", "die")), max_size=25))
def test_whoever_dies_on_the_way_every_event_comes_into_the_store_and_no_life_takes_one_twice(moves: list[str]) -> None:
    buffer, count, stored = ReportBuffer(SEAT), 0, list[str]()
    life, taken, durable = 1, list[ReportBatch](), 0
    for move in [*moves, "report", "report", "write"]:
        if move == "event":
            buffer.add_event(Event("one", str(count)))
            count += 1
        elif move == "write":
            stored += [event.message for one in taken for event in one.events]
            durable = max([durable, *(one.number for one in taken)])
            taken.clear()
        elif move == "die":
            life, durable = life + 1, 0
            taken.clear()
        elif move == "report":
            taken.append(buffer.next_batch("step", 0.0))
            buffer.sent(taken[-1], _answer(life, durable))
        else:
            buffer.requeue(buffer.next_batch("step", 0.0))
    if "die" not in moves:
        assert stored == [str(number) for number in range(count)]
    left = buffer.unwritten()
    for known in (set(stored), {*stored, *(event.message for event in (left.events if left else ()))}):
        assert sorted(known, key=int) == [str(number) for number in range(count)]


def test_many_ranks_report_less_often_and_the_hang_watch_waits_for_it() -> None:
    assert [reporter_module.interval_s(world) for world in (1, 31, 125, 1000, 9999)] == [0.25, 0.25, 1.0, 8.0, 10.0]
    ranks = [Rank(number, "", Coordinates(), number, "") for number in range(1000)]
    watch = HangWatch(ranks, 1.0, now=0.0)
    assert not watch._overdue(7, 13.0) and watch._overdue(7, 13.1)


def test_a_line_without_an_end_is_cut_and_marked_and_copies_little(tmp_path: Path) -> None:
    seat = Seat("r", 1, 0, 1, Coordinates(), Coordinates())
    with (tmp_path / "out").open("wb") as out:
        tail = LogTail(out.fileno(), "out")
        out.write(b"first\n" + b"x" * 5_000_000)
        out.flush()
        texts, kept = [], []
        for _ in range(6):
            texts += [line.text for line in tail.read(seat)]
            kept.append(len(tail._rest))
        assert texts == ["first", "x" * 65_536 + " (cut at 64 KiB)"] and max(kept) <= 65_536
        out.write(b"y\nlast\n" + b"z" * 70_000 + b"\nbegun")
        out.flush()
        assert [line.text for line in tail.read(seat)] == ["last", "z" * 65_536 + " (cut at 64 KiB)"]
        out.write(b" and ended\n")
        out.flush()
        assert [line.text for line in tail.read(seat)] == ["begun and ended"]
