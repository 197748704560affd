"""Leaves out the actions of a rank that only repeat situations it has been in before.

What a rank holds depends on how many microbatches are in flight on each of its stages, on which
stages have gradients, and on how many of its messages wait. A long program is in the same few
situations again and again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from raypp.schedules.action import KINDS, Action
from raypp.schedules.waiting import Waiting


def without_repeats(actions: Sequence[Action], waiting: Mapping[Action, Waiting] | None = None) -> list[Action]:
    """Returns a part of a rank's actions that runs the same actions in the same situations.

    A situation is, for each stage: the forwards without their backward (B, or W), the I without
    their W, and whether there was a backward; and the messages that wait. In the result, each pair
    of a situation and the kind and stage of the action that is run in it appears in the order in
    which it first appears in `actions`. Microbatches are not renumbered.

    Args:
        actions: The rank's actions.
        waiting: What waits while each of them runs (`schedules.waiting`). None: it does not count.
    """
    stages = sorted({stage for stage, _, _ in actions})
    # A situation is one number: two counts for each stage, above them a bit for each.
    bits = len(actions).bit_length() + 1
    table: dict[str, dict[int, tuple[set[int], int, int]]] = {kind: {} for kind in KINDS}
    for index, stage in enumerate(stages):
        forward = 1 << 2 * bits * index
        between = forward << bits
        flag = 1 << 2 * bits * len(stages) + index
        table["F"][stage] = set(), forward, 0
        table["B"][stage] = set(), -forward, flag
        table["I"][stage] = set(), between, 0
        table["W"][stage] = set(), -forward - between, flag
    # Above those the counts of what waits.
    top = (2 * bits + 1) * len(stages)
    waits = [0] * len(actions) if waiting is None else [_number(waiting[action], bits) << top for action in actions]
    found: list[Action] = []
    held, now = 0, waits[0] if waits else 0
    # Since the last action of `found`: the way to the present situation without its loops, and the
    # length of the way to each situation on it.
    way: list[Action] = []
    lengths = {now: 0}
    for action, waits_then in zip(actions, [*waits[1:], 0], strict=True):
        before, change, flag = table[action[1]][action[0]]
        known = now in before
        if not known:
            before.add(now)
        held = (held + change) | flag
        now = held | waits_then
        way.append(action)
        if not known:
            found += way
            way, lengths = [], {now: 0}
        elif now in lengths:
            del way[lengths[now] :]
            while len(lengths) > len(way) + 1:
                lengths.popitem()
        else:
            lengths[now] = len(way)
    return found


def _number(waiting: Waiting, bits: int) -> int:
    """Returns the counts as one number, with `bits` bits for each."""
    return waiting.activations | waiting.frozen << bits | waiting.gradients << 2 * bits
