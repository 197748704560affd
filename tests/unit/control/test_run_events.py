"""What a later life of the controller reads from the events of an earlier one."""

from __future__ import annotations

import pytest

from raypp.control.machine import Finish
from raypp.control.run_events import end_event, end_told, stop_event
from raypp.records import Event, Requests, RunState
from raypp.recovery.recall import stop_asked

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
    assert end_told(events) == finish
    assert end_told(events[:2]) is None
    assert end_told([*events, SUBMITTED]) is None


@pytest.mark.parametrize("save", [True, False])
def test_the_wish_to_stop_is_read_back_until_the_run_is_submitted_again(save: bool) -> None:
    requests = Requests(stop=True, save_before_stop=save)
    events = [SUBMITTED, stop_event(requests, 1)]
    assert stop_asked(events) == requests
    assert stop_asked([*events, SUBMITTED]) is None
