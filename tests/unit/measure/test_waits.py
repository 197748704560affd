"""Passes after waits are told apart from passes in a row."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from fake_clock import FakeClock

from raypp.measure import waits
from raypp.measure.waits import WAITS_S, slow_starts


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    clock = FakeClock()
    monkeypatch.setattr(waits, "time", clock)
    return clock


@dataclass
class Core:
    """A core whose passes are slower after waits that are long enough.

    Attributes:
        asleep_after: The shortest wait after which it is slow.
        slow: How many passes it is slow for: at first by three quarters, then by half.
    """

    asleep_after: float
    slow: int
    waits: list[float] = field(default_factory=list)
    _left: int = 0

    def wait(self, seconds: float) -> None:
        self.waits.append(seconds)
        if seconds >= self.asleep_after:
            self._left = self.slow

    def passes(self) -> tuple[float, float]:
        found = []
        for usual in (0.01, 0.02):
            factor = 1.0 if not self._left else 1.75 if self._left == self.slow else 1.5
            self._left = max(0, self._left - 1)
            found.append(usual * factor)
        return found[0], found[1]


def test_a_core_that_comes_back_slow_is_noticed_after_the_waits_that_put_it_to_sleep() -> None:
    core = Core(asleep_after=0.05, slow=3)
    found = slow_starts(core.passes, 3, core.wait)
    assert [one.wait_s for one in found] == list(WAITS_S)
    assert sorted(core.waits) == sorted(3 * WAITS_S)
    awake, asleep = [one for one in found if one.wait_s < 0.05], [one for one in found if one.wait_s >= 0.05]
    assert all((one.slower, one.lost_s) == (0.0, 0.0) for one in awake)
    for one in asleep:
        assert one.slower == pytest.approx(0.75)
        # 3/4 of the first forward, half of its backward, half of the second forward.
        assert one.lost_s == pytest.approx(0.0075 + 0.01 + 0.005)


def test_a_core_that_does_not_sleep_has_lost_nothing() -> None:
    core = Core(asleep_after=9.0, slow=3)
    assert all((one.slower, one.lost_s) == (0.0, 0.0) for one in slow_starts(core.passes, 3, core.wait))


def test_what_a_thread_wakes_up_late_counts_as_its_first_pass(clock: FakeClock) -> None:
    core = Core(asleep_after=9.0, slow=0)
    late = slow_starts(core.passes, 3, lambda seconds: clock.sleep(seconds + 0.01))
    assert [(one.slower, one.lost_s) for one in late] == [pytest.approx((1.0, 0.01))] * len(WAITS_S)
