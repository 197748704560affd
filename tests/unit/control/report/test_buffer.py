"""A rank's reports reach the store, however often the controller is killed."""

from __future__ import annotations

from raypp.control.protocol import BatchAnswer
from raypp.control.report.reporter import ReportBuffer
from raypp.records import Coordinates, Event, Requests, Seat

SEAT = Seat("run", 2, 1, 2, Coordinates(pp=1), Coordinates(2, 1, 1, 1))


def _answer(life: int, durable: int = 0) -> BatchAnswer:
    return BatchAnswer(Requests(), str(life), durable)


def test_what_is_in_the_store_is_not_kept_and_what_is_not_is_told_to_the_next_life() -> None:
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
