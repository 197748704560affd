"""Actions are timed on the device's clock, which is never waited for, and put on the common one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from raypp.rank.step.step_trace import CommonClock, between, spans_of
from raypp.stages.pipeline.action_trace import ActionTrace, Recorded
from raypp.stages.pipeline.device_clock import Anchor, DeviceClock
from raypp.torch_private import Computation


class Instant:
    """An event of a device, which reaches it when the test says so."""

    def __init__(self, at_ms: float) -> None:
        self.at_ms, self.reached = at_ms, False

    def elapsed_time(self, end: Instant) -> float:
        assert self.reached and end.reached, "the device has not reached it"
        return end.at_ms - self.at_ms


class Device(DeviceClock):
    """The clock of a device on which every instant is a millisecond after the last."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.waits = False
        self.instants: list[Instant] = []

    def now(self) -> Instant:
        self.instants.append(Instant(float(len(self.instants))))
        return self.instants[-1]


class Stage:
    stage_index = 3
    submod = torch.nn.Linear(1, 1)
    replica_sums = None


class Work:
    def wait(self) -> None:
        pass


def traced() -> tuple[ActionTrace, Device]:
    trace = ActionTrace(torch.device("cpu"), [Stage()])  # type: ignore[list-item]
    trace.clock = device = Device()
    return trace, device


def test_compute_begins_where_the_wait_for_its_message_ends() -> None:
    trace, device = traced()

    def forward(stage: Any, microbatch: int) -> None:
        trace.wait("wait F", 3, microbatch, Work())  # type: ignore[arg-type]

    do = trace.around({Computation.FORWARD: forward, Computation.RESHARD: forward})
    do[Computation.FORWARD](Stage(), 5)  # type: ignore[arg-type]
    assert do[Computation.RESHARD] is forward  # takes no time, so is not timed
    wait, action = trace.recorded
    assert (wait.kind, wait.stage, wait.microbatch) == ("wait F", 3, 5)
    assert (action.kind, action.stage, action.microbatch) == ("F", 3, 5)
    assert action.begin is wait.end and action.end is device.instants[-1]


def test_instants_of_a_device_are_read_once_it_has_reached_them_and_put_on_rank_0s_clock() -> None:
    trace, device = traced()
    anchor = Anchor(device.now(), host_s=100.0)
    with trace.timed("wait sums"):
        pass
    clock = CommonClock(offset_s=20.0, error_s=1e-5, now_s=119.0)
    with pytest.raises(AssertionError):
        spans_of([(7, trace.recorded[0])], anchor, clock)
    for instant in device.instants:
        instant.reached = True
    (span,) = spans_of([(7, trace.recorded[0])], anchor, clock)
    assert span == ("wait sums", pytest.approx(1.001), pytest.approx(0.001), 7, -1, -1)


def test_what_is_under_way_ends_with_the_last_wait_for_it() -> None:
    recorded = [
        Recorded("gather", 0.0, 0.1, 0), Recorded("wait gather", 1.0, 1.5, 0), Recorded("wait gather", 2.0, 2.25, 0),
        Recorded("F", 1.0, 3.0, 0, 0), Recorded("sum", 4.0, 4.0, 0), Recorded("sum", 4.5, 4.5, 0),
        Recorded("wait sums", 5.0, 6.0),
    ]  # fmt: skip
    spans = spans_of([(1, one) for one in recorded], Anchor(0.0, 0.0), CommonClock(0.0, 0.0, 0.0))
    assert spans[:-2] == [(one.kind, one.begin, one.end - one.begin, 1, one.stage, one.microbatch) for one in recorded]
    assert spans[-2:] == [("gathering", 0.0, 2.25, 1, 0, -1), ("summing", 4.0, 2.0, 1, 0, -1)]


def test_a_clock_that_drifts_is_less_exact() -> None:
    found = between(CommonClock(1.0, 1e-5, 9.0), CommonClock(1.0004, 2e-5, 9.5))
    assert found == CommonClock(pytest.approx(1.0002), pytest.approx(2.2e-4), 9.0)


def test_the_host_anchors_itself_on_a_cpu() -> None:
    assert DeviceClock(torch.device("cpu")).anchor().seconds(3.5) == 3.5
