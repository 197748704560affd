"""A worker process whose controller never answers: seats taken, left and taken again."""

import contextlib
import io
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, cast

import pytest

from raypp.control import worker as worker_module
from raypp.control.protocol import RankEnd, RunRequest
from raypp.control.worker import Worker
from raypp.errors import DataError, RayppError
from raypp.failure_kinds import FailureKind
from raypp.job.load import job_document, parse_job
from raypp.planning.decide import decide
from raypp.planning.decision import Decision
from raypp.records import Coordinates, Event, RankFailure, RankResult, Reporter, Seat

_lived: set[int] = set()
_left: set[int] = set()
_go = threading.Event()
_slow_leave = threading.Event()


class NotFiniteError(RayppError):
    """Declares its kind, as the runtime's own does."""

    failure_kind = FailureKind.NONFINITE


class WordlessError(Exception):
    """Cannot say what it is, like a user's exception whose own message has a mistake."""

    def __str__(self) -> str:
        raise AttributeError("no attribute 'what'")


def live(decision: Decision, seat: Seat, reporter: Reporter) -> RankResult:
    """By attempt: 1, 2 and 7 wait until they are told to leave, 3 raises, 4 leaves a thread at
    work, 6 is not finite, 8 raises what has no words, 5 and 9 are fine."""
    reporter.event(Event("lived", f"attempt {seat.attempt}", attempt=seat.attempt))
    _lived.add(seat.attempt)
    if seat.attempt == 3:
        raise DataError("all wrong")
    if seat.attempt == 6:
        raise NotFiniteError("step 3: the loss is nan")
    if seat.attempt == 8:
        raise WordlessError
    if seat.attempt == 4:
        threading.Thread(target=_go.wait, args=(20,), name="raypp-save-7", daemon=True).start()
    while seat.attempt in (1, 2, 7):
        if seat.attempt in _left:
            raise RuntimeError("some connection was closed")
        time.sleep(0.01)
    return RankResult(seat.rank, 1, False, None)


def leave(seat: Seat) -> None:
    _left.add(seat.attempt)
    if seat.attempt == 7:
        _slow_leave.wait(60)


def _request(orphan_timeout_s: float) -> RunRequest:
    job = parse_job({"name": "run", "recovery": {"orphan_timeout_s": orphan_timeout_s}})
    return RunRequest("run", job_document(job), rank_function=f"{__name__}:live")


@pytest.fixture
def worker() -> Iterator[Worker]:
    _go.clear()
    yield Worker(_request(1e6), "pp0", None, 5.0)
    _go.set()


@contextlib.contextmanager
def _full_disk(buffering: str) -> Iterator[None]:
    """The disk of this process' log is full; Python writes there at once, or line by line."""
    raw = io.FileIO("/dev/full", "w")
    full: Any = io.TextIOWrapper(cast(Any, raw) if buffering == "none" else io.BufferedWriter(raw), line_buffering=True)
    try:
        with contextlib.redirect_stdout(full), contextlib.redirect_stderr(full):
            yield
    finally:
        with contextlib.suppress(OSError):
            full.close()


def _begin(worker: Worker, attempt: int) -> None:
    worker.begin(
        decide(parse_job({"name": "run"})).document(),
        Seat("run", attempt, 0, 1, Coordinates(), Coordinates(1, 1, 1, 1, 1)),
        0,
    )


def _end(worker: Worker, attempt: int) -> RankEnd:
    end = worker.outcome(attempt, 60.0)
    assert end is not None
    return end


def test_a_seat_is_left_and_another_taken_in_the_same_process(worker: Worker) -> None:
    for attempt in (1, 2):
        _begin(worker, attempt)
        while attempt not in _lived:  # one that is left before it began has nothing to tell
            assert worker.outcome(attempt, 0.05) is None
        with pytest.raises(RuntimeError, match=f"attempt {attempt}"):
            _begin(worker, 9)
        worker.leave(attempt + 1)  # of another attempt: means nothing
        assert worker.outcome(attempt, 0.1) is None
        worker.leave(attempt)
        end = _end(worker, attempt)
        assert isinstance(end.result, RankFailure)
        assert (end.reusable, end.result.kind) == (True, "lost_peer")
        assert end.unwritten is not None and [event.message for event in end.unwritten.events] == [f"attempt {attempt}"]
    _begin(worker, 5)
    assert _end(worker, 5).result == RankResult(0, 1, False, None)
    assert worker.outcome(1, 0.0) is None


def test_an_interruption_that_takes_long_blocks_no_answer_but_the_next_seat(worker: Worker) -> None:
    _slow_leave.clear()
    _begin(worker, 7)
    while 7 not in _lived:
        time.sleep(0.01)
    leaving = threading.Thread(target=worker.leave, args=(7,), daemon=True)
    leaving.start()
    end = _end(worker, 7)  # needs the worker's lock, while the interruption is not over
    assert leaving.is_alive() and isinstance(end.result, RankFailure)
    beginning = threading.Thread(target=_begin, args=(worker, 9), daemon=True)
    beginning.start()
    beginning.join(0.3)
    assert beginning.is_alive(), "the interruption would cut the connections of the next attempt"
    _slow_leave.set()
    beginning.join(60)
    assert _end(worker, 9).result == RankResult(0, 1, False, None)
    leaving.join(60)
    assert not leaving.is_alive()


def test_a_process_that_failed_by_itself_or_is_still_at_work_takes_no_other_seat(worker: Worker) -> None:
    _begin(worker, 3)
    end = _end(worker, 3)
    assert isinstance(end.result, RankFailure) and end.result.kind == "user_error"
    assert not end.reusable and "user_error" in end.why
    _begin(worker, 4)
    end = _end(worker, 4)
    assert not end.reusable and "raypp-save-7" in end.why


def test_a_process_whose_step_was_not_finite_takes_another_seat(worker: Worker) -> None:
    _begin(worker, 6)
    end = _end(worker, 6)
    assert isinstance(end.result, RankFailure) and (end.result.kind, end.reusable) == ("nonfinite", True)


@pytest.mark.parametrize("buffering", ["none", "lines"])
def test_a_rank_whose_log_is_on_a_full_disk_still_reports_how_it_failed(worker: Worker, buffering: str) -> None:
    with _full_disk(buffering):
        with pytest.raises(OSError, match="No space left"):
            print("a line", file=sys.stderr, flush=True)
        _begin(worker, 3)
        end = _end(worker, 3)
    assert isinstance(end.result, RankFailure)
    assert (end.result.kind, end.result.cause) == ("user_error", "all wrong")


def test_an_orphan_whose_log_is_on_a_full_disk_still_exits(monkeypatch: pytest.MonkeyPatch) -> None:
    exited = threading.Event()
    removed: list[str] = []
    monkeypatch.setattr(worker_module, "holds_devices", lambda run: False)
    monkeypatch.setattr(worker_module, "remove_groups_of", removed.append)
    monkeypatch.setattr(os, "_exit", lambda code: exited.set())
    with _full_disk("none"):
        Worker(_request(0.2), "pp0", None, 5.0)
        assert exited.wait(60.0) and removed == ["run"]


def test_an_exception_that_cannot_say_what_it_is_ends_the_rank_all_the_same(worker: Worker) -> None:
    _begin(worker, 8)
    end = _end(worker, 8)
    assert isinstance(end.result, RankFailure) and end.result.kind == "raised"
    assert end.result.cause == "WordlessError, whose message cannot be read (AttributeError)"
    assert "raise WordlessError" in end.result.details


def test_a_rank_has_an_end_whatever_fails_around_it(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(seat: Seat) -> None:
        raise WordlessError

    monkeypatch.setattr(worker_module, "set_seat_environment", fail)
    _begin(worker, 5)
    end = _end(worker, 5)
    assert isinstance(end.result, RankFailure) and not end.reusable
    assert (end.result.kind, end.result.cause.partition(" ")[0]) == ("unknown", "WordlessError")
