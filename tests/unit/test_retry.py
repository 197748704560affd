"""Retries end at their deadline, and give up at once on what cannot pass."""

import pytest
from stand_in_clock import StandInClock

from raypp import retry
from raypp.retry import Backoff

FAST = Backoff(timeout_s=0.2, first_s=0.001, longest_s=0.01)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> StandInClock:
    clock = StandInClock()
    monkeypatch.setattr(retry, "time", clock)
    return clock


def test_pauses_grow_up_to_the_longest_and_keep_their_certain_part() -> None:
    pauses = Backoff(timeout_s=60.0, first_s=1.0, longest_s=4.0, factor=2.0).pauses()
    assert [next(pauses) for _ in range(5)] == [1.0, 2.0, 4.0, 4.0, 4.0]
    drawn = Backoff(timeout_s=60.0, first_s=1.0, longest_s=1.0, jitter=0.5).pauses()
    values = [next(drawn) for _ in range(200)]
    assert all(0.5 <= value <= 1.0 for value in values) and len(set(values)) > 100


def test_no_pause_goes_beyond_the_deadline(clock: StandInClock) -> None:
    pauses = Backoff(timeout_s=0.05, first_s=10.0, longest_s=10.0).pauses()
    assert next(pauses) <= 0.05
    clock.now += 0.06
    assert next(pauses, None) is None


def test_a_call_is_repeated_while_its_failure_may_pass() -> None:
    tries: list[int] = []

    def third_time() -> str:
        tries.append(1)
        if len(tries) < 3:
            raise ConnectionError("not yet")
        return "done"

    assert FAST.call(third_time, lambda error: isinstance(error, ConnectionError)) == "done"
    assert len(tries) == 3


def test_a_failure_that_cannot_pass_is_raised_at_once_and_any_other_at_the_deadline(clock: StandInClock) -> None:
    tries: list[int] = []

    def never() -> None:
        tries.append(1)
        raise ConnectionError("never")

    with pytest.raises(ConnectionError):
        FAST.call(never, lambda error: isinstance(error, TimeoutError))
    assert len(tries) == 1
    begun = clock.now
    with pytest.raises(ConnectionError):
        FAST.call(never, lambda error: True)
    assert len(tries) > 3 and clock.now == pytest.approx(begun + 0.2)


def test_a_condition_is_waited_for_until_the_deadline(clock: StandInClock) -> None:
    begun = clock.now
    assert FAST.wait(lambda: clock.now > begun + 0.02)
    assert clock.now < begun + 0.04
    begun = clock.now
    assert not FAST.wait(lambda: False)
    assert clock.now == pytest.approx(begun + 0.2)
