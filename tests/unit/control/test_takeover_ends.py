"""How a run has ended whose ranks are gone when a restarted controller finds it."""

from __future__ import annotations

import pytest

from raypp.control.machine import Finish
from raypp.control.run_events import stop_event
from raypp.control.takeover import Takeover
from raypp.records import Requests, RunState

LACKS = Finish(RunState.STOPPED, "no rank was left to save the last checkpoint", exit_code=1)


@pytest.mark.parametrize(
    ("newest", "save", "end"),
    [
        (20, None, Finish(RunState.SUCCEEDED)),
        (20, True, Finish(RunState.SUCCEEDED)),
        (10, None, None),
        (12, True, Finish(RunState.STOPPED)),
        (10, True, LACKS),
        (None, True, LACKS),
        (10, False, Finish(RunState.STOPPED)),
    ],
)
def test_a_stop_without_its_checkpoint_is_no_success(newest: int | None, save: bool | None, end: Finish | None) -> None:
    events = [] if save is None else [stop_event(Requests(stop=True, save_before_stop=save), 1)]
    assert Takeover(1, events, []).finish_without_ranks(newest, steps=20, step=12) == end
