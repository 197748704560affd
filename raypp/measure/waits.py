"""Measures how slow a core comes back from a wait: `schedules.slow_starts` says what that is.

A rank waits in `recv`, and its core sleeps. So here the thread sleeps for some lengths of time, and
the passes after that are compared with the same passes in a row. They are compared in CPU time of
the thread, like the other costs: a slow core takes more of it. What the thread wakes up late is
added to its first pass.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from math import ceil

from raypp.schedules.slow_starts import SlowStart

WAITS_S = (0.002, 0.01, 0.05, 0.2)
"""From a message that is just late to the fill of a deep pipeline."""
_FOLLOWED_S, _MOST = 0.1, 32
"""Seconds of passes after a wait that are looked at, and at most how many microbatches."""
_NOTICED = 0.03
"""A pass that is slower by less is at full speed: medians of a few passes differ by that much."""

Passes = Callable[[], tuple[float, float]]
"""Runs one microbatch forward and backward; returns the seconds of both."""


def slow_starts(passes: Passes, rounds: int, wait: Callable[[float], None] = time.sleep) -> list[SlowStart]:
    """Measures passes after waits of each length. Lengths take turns.

    Args:
        passes: Runs on a warm core.
        rounds: How often each length is measured.
        wait: Waits for some seconds.
    """
    usual = statistics.median(sum(passes()) for _ in range(rounds))
    count = min(_MOST, max(1, ceil(_FOLLOWED_S / max(usual, 1e-6))))
    late: dict[float, list[float]] = {seconds: [] for seconds in (0.0, *WAITS_S)}
    taken: dict[float, list[list[float]]] = {seconds: [] for seconds in late}
    for _ in range(rounds):
        for seconds in late:
            begun = time.perf_counter()
            if seconds:
                wait(seconds)
            late[seconds].append(time.perf_counter() - begun - seconds)
            taken[seconds].append([one for _ in range(count) for one in passes()])
    in_a_row = _medians(taken[0.0])
    return [
        _compared(seconds, _medians(taken[seconds]), in_a_row, max(0.0, statistics.median(late[seconds])))
        for seconds in WAITS_S
    ]


def _medians(taken: list[list[float]]) -> list[float]:
    """Returns the median of each pass after the wait, by its place."""
    return [statistics.median(same) for same in zip(*taken, strict=True)]


def _compared(wait_s: float, after: list[float], in_a_row: list[float], late: float) -> SlowStart:
    """Compares passes after a wait with those in a row, up to the first that is at full speed."""
    after = [after[0] + late, *after[1:]]
    lost = 0.0
    for seconds, usual in zip(after, in_a_row, strict=True):
        if seconds <= usual * (1 + _NOTICED):
            break
        lost += seconds - usual
    slower = after[0] / in_a_row[0] - 1 if in_a_row[0] > 0 else 0.0
    return SlowStart(wait_s, slower, lost) if lost else SlowStart(wait_s, 0.0, 0.0)
