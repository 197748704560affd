"""What a restarted controller reads back from the events."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raypp.control.machine import Finish
from raypp.control.run_events import (
    end_event,
    failed_attempts,
    is_begun,
    last_device,
    last_shape,
    own_events,
    recorded_end,
    requested_stop,
    stop_event,
    with_submission,
)
from raypp.records import Event, Requests, RunState

SUBMITTED = Event("submitted", "submitted as Ray job 1")


@pytest.mark.parametrize(
    "finish",
    [
        Finish(RunState.SUCCEEDED),
        Finish(RunState.STOPPED),
        Finish(RunState.STOPPED, "a rank failed before the last checkpoint: pp0"),
        Finish(RunState.FAILED, "the data is all wrong", exit_code=2),
    ],
)
def test_the_end_that_was_told_is_read_back_until_the_run_is_submitted_again(finish: Finish) -> None:
    events = [SUBMITTED, Event("rank_failed", "pp0"), end_event(finish, 1, 40)]
    assert recorded_end(events) == finish
    assert recorded_end(events[:2]) is None
    assert recorded_end([*events, SUBMITTED]) is None


@pytest.mark.parametrize("save", [True, False])
def test_the_wish_to_stop_is_read_back_until_the_run_is_submitted_again(save: bool) -> None:
    requests = Requests(stop=True, save_before_stop=save)
    events = [SUBMITTED, stop_event(requests, 1)]
    assert requested_stop(events) == requests
    assert requested_stop([*events, SUBMITTED]) is None


_SHAPE = {"pp": 2, "dp_replicate": 1, "fsdp": 1, "cp": 1, "ep": 1, "microbatches": 4}


def _all_of(submission: str, attempt: int, state: RunState, time: float, pp: int) -> list[Event]:
    """Returns one event of each kind that is read back, a second apart."""
    told = [
        SUBMITTED,
        Event("device_chosen", "", details={"device": f"device of {submission}"}),
        Event("reshaped", "", attempt=attempt, details={"to": {**_SHAPE, "pp": pp}}),
        Event("committed", "", attempt=attempt, step=10 * attempt),
        Event("rank_failed", "", attempt=attempt, rank=1, step=3, details={"kind": "killed"}),
        stop_event(Requests(stop=True, save_before_stop=submission == "new"), attempt),
        end_event(Finish(state), attempt, 40),
    ]
    timed = [replace(event, time=time + second) for second, event in enumerate(told)]
    return [with_submission(event, submission) for event in timed]


def _read_back(events: list[Event], submission: str) -> tuple[object, ...]:
    own = own_events(sorted(events, key=lambda event: event.time), submission)
    read = (recorded_end, requested_stop, failed_attempts, last_shape, last_device)
    return tuple(function(own) for function in read)


@pytest.mark.parametrize("new_at", [500.0, 998.5, 1003.5, 2000.0], ids=["behind", "a bit", "among", "after"])
@pytest.mark.parametrize("old_id", ["old", ""], ids=["of this raypp", "of an older raypp"])
def test_the_clock_does_not_decide_what_belongs_to_a_submission(new_at: float, old_id: str) -> None:
    old = _all_of(old_id, 3, RunState.FAILED, 1000.0, pp=2)
    new = _all_of("new", 4, RunState.STOPPED, new_at, pp=3)
    only_submitted = _read_back([*old, new[0]], "new")
    assert only_submitted == (None, None, (), None, None)
    end, stop, failed, shape, device = _read_back([*old, *new], "new")
    assert end == Finish(RunState.STOPPED) and stop == Requests(stop=True, save_before_stop=True)
    assert isinstance(failed, tuple) and [(one.attempt, one.committed_step) for one in failed] == [(4, 40)]
    assert getattr(shape, "pp", None) == 3 and device == "device of new"
    assert is_begun([*old, new[0]], "new") and not is_begun(old, "new")


def test_a_clock_that_steps_back_after_the_submission_makes_nothing_forgotten() -> None:
    told = _all_of("new", 4, RunState.STOPPED, 1000.0, pp=3)
    back = [told[0], *(replace(event, time=event.time - 500) for event in told[1:])]
    assert _read_back(back, "new") == _read_back(told, "new")


def test_attempts_are_read_in_their_order_whatever_the_clock_says() -> None:
    first, second = _all_of("new", 1, RunState.STOPPED, 1000.0, pp=3), _all_of("new", 2, RunState.STOPPED, 500.0, pp=2)
    _, _, failed, shape, _ = _read_back([*first, *second[1:]], "new")
    assert isinstance(failed, tuple) and [(one.attempt, one.committed_step) for one in failed] == [(1, 10), (2, 20)]
    assert getattr(shape, "pp", None) == 2


def test_without_a_submission_the_events_since_the_last_one_count_as_before() -> None:
    events = [*_all_of("", 1, RunState.FAILED, 1000.0, pp=2), Event("succeeded", "after step 0")]
    assert own_events(events, "") == events and is_begun([], "")
    assert with_submission(SUBMITTED, "") is SUBMITTED
