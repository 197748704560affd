"""What a restarted controller reads back from the events."""

from __future__ import annotations

import pytest

from raypp.control.machine import Finish
from raypp.control.run_events import end_event, recorded_end, requested_stop, stop_event
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
