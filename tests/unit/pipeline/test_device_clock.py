"""Times on a device are read once it has reached them, and never waited for."""

from __future__ import annotations

import time

import pytest
import torch

from raypp.rank.step.step import Stopwatch
from raypp.stages.pipeline.device_clock import ActionClock, DeviceClock, Span, _reached
from raypp.state.checkpoint.snapshot import SnapshotBuffer
from raypp.state.memory.tier import SnapshotCosts


class Card:
    """A device's module, and an event: notes what is done in which order."""

    def __init__(self) -> None:
        self.done: list[object] = []

    def set_device(self, device: torch.device) -> None:
        self.done.append(device)

    def query(self) -> bool:
        self.done.append("query")
        return True


def test_a_thread_that_asks_for_an_event_makes_its_device_current_first() -> None:
    card, device = Card(), torch.device("cuda", 3)
    assert _reached(card, device, card) and card.done == [device, "query"]


class Instant:
    """An instant of a device, as events of torch are; the test says when it is reached."""

    def __init__(self, at_ms: float) -> None:
        self.at_ms, self.reached = at_ms, False

    def query(self) -> bool:
        return self.reached

    def elapsed_time(self, end: Instant) -> float:
        if not end.reached:
            raise RuntimeError("not reached yet")
        return end.at_ms - self.at_ms


class Ahead(DeviceClock):
    """The clock of a device that has not begun; every instant is a second after the last."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.waits = False
        self.instants: list[Instant] = []

    def now(self) -> Instant:
        self.instants.append(Instant(1000.0 * len(self.instants)))
        return self.instants[-1]


def ahead() -> tuple[Stopwatch, Ahead]:
    watch = Stopwatch()
    watch._clock = clock = Ahead()
    return watch, clock


def reach(clock: Ahead, instants: int) -> None:
    for instant in clock.instants[:instants]:
        instant.reached = True


def test_a_part_on_a_cpu_is_known_when_it_ends_and_adds_up() -> None:
    watch = Stopwatch()
    for _ in range(2):
        with watch.part("data"):
            time.sleep(0.01)
    assert 0.02 <= watch.parts["data"] < 10
    watch.next_step()
    assert not watch.parts


def test_a_part_that_raises_is_timed() -> None:
    watch = Stopwatch()
    with pytest.raises(ValueError), watch.part("data"):
        raise ValueError
    assert "data" in watch.parts


def test_a_part_that_a_device_has_not_ended_counts_in_the_next_step() -> None:
    watch, clock = ahead()
    for part in ("pipeline", "optimizer"):
        with watch.part(part):
            pass
    reach(clock, 3)
    watch.read()
    assert watch.parts == {"pipeline": 1.0}
    watch.next_step()
    with watch.part("pipeline"):
        pass
    reach(clock, 6)
    watch.read()
    assert watch.parts == {"optimizer": 1.0, "pipeline": 1.0}


def test_the_cost_of_a_snapshot_is_known_once_the_device_has_reached_the_update_it_held() -> None:
    costs = SnapshotCosts()
    clock = Ahead()
    snapshot, last = SnapshotBuffer().take([]), SnapshotBuffer().take([])  # no update follows the last one
    snapshot.held = Span(clock.now(), clock.now())
    costs.unread += [(0.5, snapshot), (0.25, last)]
    costs.read()
    assert not costs.snapshots
    reach(clock, 2)
    costs.read()
    assert list(costs.snapshots) == [1.5, 0.25] and not costs.unread


def test_actions_that_a_device_has_not_ended_have_no_time() -> None:
    timer = ActionClock(torch.device("cpu"))
    timer._clock = clock = Ahead()
    for stage in (0, 1):
        with timer.timed("F", stage):
            pass
    reach(clock, 2)
    assert timer.medians() == {("F", 0): 1.0}
    reach(clock, 4)
    assert timer.taken_s() == 2.0
    assert timer.taken_s() == 0.0
