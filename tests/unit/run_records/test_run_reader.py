"""The reader: a run's records read from any place, at any time."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypp.records import Event, StepReport
from raypp.state.run_records.append_log import Cursor
from raypp.state.run_records.json_lines import (
    LogLine,
    TimedStep,
    event_line,
    log_line,
    read_event,
    read_log,
    read_step,
    step_line,
)
from raypp.state.run_records.quantities import ROW_KEYS
from raypp.state.run_records.reader import RunReader, _last_reports
from raypp.state.run_records.recorder import RunRecorder
from raypp.storage import open_store


def report(step: int, attempt: int = 1, loss: float = 1.0) -> StepReport:
    return StepReport(step, loss, 0.5, 1000, 64, 0.1, 10000.0, attempt)


@pytest.fixture
def store(tmp_path):
    return open_store(str(tmp_path / "store"))


def record(store, writer, steps=(), events=(), logs=()):
    with RunRecorder(store, "r", writer, interval_s=60) as recorder:
        for step in steps:
            recorder.step(step)
        for event in events:
            recorder.event(event)
        for line in logs:
            recorder.log(line)


def bits(value: float) -> bytes:
    return struct.pack("<d", value)


@given(st.floats(allow_nan=False), st.floats(allow_nan=False))
def test_floats_come_back_bit_for_bit(loss, norm):
    read = read_step(step_line(StepReport(1, loss, norm, 1, 1, 0.1, 1.0, 1), 0.0)).report
    assert bits(read.loss) == bits(loss)
    assert bits(read.grad_norm) == bits(norm)


def test_what_only_some_models_report_comes_after_the_keys_of_every_row() -> None:
    plain = StepReport(1, 2.0, 0.5, 10, 8, 0.1, 100.0, 1)
    experts = StepReport(1, 2.0, 0.5, 10, 8, 0.1, 100.0, 1, extras={"aux_loss": 2.01, "z_loss": 3.2})
    rows = [read_step(step_line(report, 0.0)).row() for report in (plain, experts)]
    assert tuple(rows[0]) == ROW_KEYS
    assert tuple(rows[1]) == (*ROW_KEYS, "aux_loss", "z_loss") and rows[1]["z_loss"] == 3.2


@given(st.text(), st.text())
def test_any_text_of_a_log_line_or_event_is_one_line_and_comes_back(text, label):
    for line in (log_line(LogLine(text, 0, label, 1, "err", 1.0)), event_line(Event("k", text))):
        assert line.count(b"\n") == 1
        assert line.endswith(b"\n")
        assert len(line.splitlines()) == 1
    assert read_log(log_line(LogLine(text, 0, label, 1, "err", 1.0))) == LogLine(text, 0, label, 1, "err", 1.0)
    assert read_event(event_line(Event("k", text, 1.0))) == Event("k", text, 1.0)


def test_bytes_that_are_no_text_become_printable():
    line = log_line(LogLine("caf\udce9", 0))
    assert read_log(line).text.encode() == b"caf?"


@pytest.mark.parametrize(
    ("written", "rows"),
    [
        pytest.param(
            {"a1": [(step, 1) for step in range(1, 8)], "a2": [(6, 2)]},
            [*((step, 1) for step in range(1, 6)), (6, 2)],
            id="a restart left steps behind",
        ),
        pytest.param({"a10": [(2, 10)], "a9": [(1, 9), (2, 9)]}, [(1, 9), (2, 10)], id="attempts go by number"),
        pytest.param(
            {"c1": [(1, 1), (2, 1), (3, 1)], "c2": [(2, 1), (3, 1), (4, 1)]},
            [(1, 1), (2, 1), (3, 1), (4, 1)],
            id="sent twice within an attempt",
        ),
    ],
)
def test_the_history_has_each_step_once_from_the_last_attempt_that_took_it(store, written, rows):
    for writer, steps in written.items():
        record(store, writer, [report(*one) for one in steps])
    assert [(row["step"], row["attempt"]) for row in RunReader(store, "r").history()] == rows


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 3), st.integers(0, 4), st.booleans()), max_size=20))
def test_steps_that_are_read_one_by_one_are_those_that_are_read_at_once(reports) -> None:
    """Also if clocks step back, and if a rank of an earlier attempt reports late."""
    read = []
    for step, attempt, clock, _ in reports:
        read.append(TimedStep(report(step, attempt), float(clock)))
    reader = RunReader(None, "r")
    news: list[TimedStep] = []
    reader._poll = lambda *_: news  # type: ignore[method-assign]
    for one, (*_, seen) in zip(read, reports, strict=True):
        news.append(one)
        if seen:
            rows = reader.history()
            news.clear()
            assert rows == [timed.row() for timed in reader.steps()]
    rows = reader.history()
    assert rows == [timed.row() for timed in _last_reports(read)]


def test_polling_gives_new_records_and_reads_finished_parts_once(store):
    reads = []

    class Counting:
        url = store.url

        def list(self, prefix=""):
            return store.list(prefix)

        def get(self, key, start=None, end=None):
            reads.append((key, start))
            return store.get(key, start, end)

    reader = RunReader(Counting(), "r")
    assert reader.history() == []
    with RunRecorder(store, "r", "a1", interval_s=60, part_bytes=1000) as recorder:
        for step in range(1, 21):
            recorder.step(report(step))
            recorder.flush()
            assert [row["step"] for row in reader.history()] == list(range(1, step + 1))
        count = len(reads)
        reader.history()
        assert len(reads) == count
    assert len(set(reads)) == len(reads) == 20


def test_a_line_that_is_not_whole_yet_waits_for_the_next_poll(store):
    whole = step_line(report(1), 1.0)
    store.put("r/history/a1-00001.jsonl", whole + whole[:20])
    reader = RunReader(store, "r")
    assert len(reader.history()) == 1
    store.put("r/history/a1-00001.jsonl", whole + step_line(report(2), 1.0))
    assert [row["step"] for row in reader.history()] == [1, 2]


def test_lines_that_cannot_be_understood_are_counted_and_left_out(store):
    good = step_line(report(1), 1.0)
    store.put("r/history/a1-00001.jsonl", b"not json\n[1]\n{}\n" + good)
    reader = RunReader(store, "r")
    assert len(reader.history()) == 1
    assert reader.damaged == 3


def test_a_run_without_records_reads_as_empty(store):
    reader = RunReader(store, "r")
    assert not reader.exists()
    assert reader.status() is None
    assert reader.history() == []
    assert reader.events() == []
    assert list(reader.logs()) == []


def test_a_run_is_not_taken_for_another_whose_name_starts_like_it(store):
    with RunRecorder(store, "run-2", "a1") as recorder:
        recorder.step(report(1))
    assert not RunReader(store, "run").exists()
    assert RunReader(store, "run").history() == []


def test_events_of_several_writers_are_in_the_order_of_time(store):
    record(store, "c2", events=[Event("c", "", 3.0)])
    record(store, "c1", events=[Event("a", "", 1.0), Event("b", "", 2.0), Event("d", "", 4.0)])
    assert [event.kind for event in RunReader(store, "r").events()] == ["a", "b", "c", "d"]


def test_logs_are_merged_by_time_filtered_by_rank_and_followed_by_cursor(store):
    record(store, "a1", logs=[LogLine(f"one {n}", n % 2, time=float(n)) for n in range(4)])
    record(store, "a2", logs=[LogLine("two", 1, time=1.5)])
    reader = RunReader(store, "r")
    assert [line.text for line in reader.logs()] == ["one 0", "one 1", "two", "one 2", "one 3"]
    cursor = Cursor()
    assert [line.text for line in reader.logs(1, cursor)] == ["one 1", "two", "one 3"]
    assert list(reader.logs(1, cursor)) == []
    record(store, "a3", logs=[LogLine("three", 1), LogLine("zero", 0)])
    assert [line.text for line in reader.logs(1, cursor)] == ["three"]


def test_a_reader_that_stops_in_the_middle_goes_on_where_it_was(store):
    for writer in ("a1", "a2"):
        record(store, writer, logs=[LogLine(f"{writer} {n}", 0, time=float(n)) for n in range(5)])
    reader, cursor = RunReader(store, "r"), Cursor()
    first = reader.logs(since=cursor)
    some = [next(first).text for _ in range(3)]
    rest = [line.text for line in reader.logs(since=cursor)]
    assert len(some + rest) == 10
    assert len(set(some + rest)) == 10
