"""How much slower a trace's passes are after waits, for predictions from its times."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from raypp.observe.trace import COMPUTE, RankTrace
from raypp.schedules.slow_starts import SlowStart, SlowStarts

_BINS = (0.001, 0.005, 0.02, 0.1)
"""Waits are grouped by these lengths. After a shorter one than the first, a core did not sleep."""
_ENOUGH = 3
"""Fewest passes from which a median is meaningful."""
_NOTICED = 0.03
"""A pass that is slower by less is at full speed."""

Action = tuple[str, int]
"""The kind and the stage of a pass."""


class Pass(NamedTuple):
    """A forward or a backward of a trace.

    Attributes:
        action: What was computed.
        waited: Seconds that its rank waited for messages since its last pass.
        seconds: Its own, without waits in it.
    """

    action: Action
    waited: float
    seconds: float


def waited_before(one: RankTrace) -> Iterator[float]:
    """Yields how long a rank waited for messages before each of its forwards and backwards."""
    waited = 0.0
    for span in one.spans:
        if span.kind in ("wait F", "wait B"):
            waited += span.seconds
        elif span.kind in COMPUTE:
            yield waited
            waited = 0.0


def slow_starts_of(passes: Iterable[Pass]) -> tuple[dict[Action, list[float]], SlowStarts | None]:
    """Compares passes after waits with those in a row.

    Returns:
        The seconds of passes at full speed, by action: of those in a row, or of all less what a
        wait costs if there are not enough of them. And how much slower passes are after waits;
        None: they are not, and nothing is returned by action.
    """
    listed = list(passes)
    in_a_row: dict[Action, list[float]] = defaultdict(list)
    for one in listed:
        if one.waited < _BINS[0]:
            in_a_row[one.action].append(one.seconds)
    known = {action: found for action, found in in_a_row.items() if len(found) >= _ENOUGH}
    usual = {action: statistics.median(found) for action, found in known.items()}
    starts = SlowStarts.of(_starts([one for one in listed if usual.get(one.action)], usual))
    if starts is None:
        return {}, None
    at_speed: dict[Action, list[float]] = defaultdict(list)
    for one in listed:
        if one.action not in known:
            at_speed[one.action].append(starts.at_full_speed(one.waited, one.seconds))
    return known | at_speed, starts


def _starts(passes: Sequence[Pass], usual: dict[Action, float]) -> Iterator[SlowStart]:
    """Yields what passes lose after waits of each group of lengths.

    The largest share and the largest loss of any action: a core that always loses the same seconds
    slows short passes by a larger share, one that is slow for long costs long passes more.
    """
    for least, below in zip(_BINS, (*_BINS[1:], float("inf")), strict=True):
        by_action: dict[Action, list[Pass]] = defaultdict(list)
        for one in passes:
            if least <= one.waited < below:
                by_action[one.action].append(one)
        groups = {action: group for action, group in by_action.items() if len(group) >= _ENOUGH}
        if not groups:
            continue
        medians = {action: statistics.median(one.seconds for one in group) for action, group in groups.items()}
        slower = max(seconds / usual[action] - 1 for action, seconds in medians.items())
        lost = max(seconds - usual[action] for action, seconds in medians.items())
        waited = statistics.median(one.waited for group in groups.values() for one in group)
        yield SlowStart(waited, slower, lost) if slower > _NOTICED else SlowStart(waited, 0.0, 0.0)
