"""Which messages of a rank are not known to have arrived, at each of its actions.

A message from a peer proves that all that the peer used before it sent this one has arrived; gloo
cannot tell. What waits follows from the program alone.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from raypp.planning.schedules.action import KINDS, Action, Program, stages_with_backward
from raypp.planning.schedules.communication import Message, needed_by, sent_by

_FROZEN, _GRADIENT = 1 << 32, 1 << 64
"""What a message adds to all counts of a rank as one number; other activations add 1."""


class Waiting(NamedTuple):
    """Messages of a rank that are not known to have arrived.

    Attributes:
        activations: Of stages that have a backward. They wait no longer than until it has run.
        frozen: Activations of stages without one. Often nothing proves their arrival, and they wait
            until the step ends.
        gradients: Of stages' inputs.
    """

    activations: int = 0
    frozen: int = 0
    gradients: int = 0


def arrivals(program: Program) -> dict[int, dict[Action, list[Message]]]:
    """Returns the sends of every rank that are known to have arrived once it runs an action."""
    rank_of, backward = _rank_of_stage(program), stages_with_backward(program)
    used: dict[tuple[int, int], list[tuple[Message, Action]]] = defaultdict(list)  # by sender and user
    proven: dict[Message, int] = {}  # how many messages of its receiver the sender has used
    for rank, actions in program.items():
        for action in actions:
            if (use := needed_by(action, rank_of)) is not None:
                used[rank_of[use.stage], rank].append((use, action))
            if (send := sent_by(action, rank_of, backward)) is not None:
                proven[send] = len(used[rank_of[send.to_stage], rank])
    found: dict[int, dict[Action, list[Message]]] = {rank: {} for rank in program}
    for (peer, rank), uses in used.items():
        known = 0
        for use, action in uses:
            if proven[use] > known:
                found[rank][action] = [message for message, _ in used[rank, peer][known : proven[use]]]
                known = proven[use]
    return found


def waiting_sends(program: Program) -> dict[int, dict[Action, Waiting]]:
    """Returns what waits on each rank while it runs an action, by rank and action."""
    rank_of, backward = _rank_of_stage(program), stages_with_backward(program)
    # The counts of a rank are one number, and each combination of them is one object.
    known = {0: Waiting()}
    waiting: dict[int, dict[Action, Waiting]] = {}
    for rank, arrived in arrivals(program).items():
        of_rank = waiting[rank] = {}
        count = 0
        for action in program[rank]:
            of_rank[action] = known[count]
            for kind, stage, _ in arrived.get(action, ()):
                count -= _GRADIENT if kind == "B" else 1 if stage in backward else _FROZEN
            if (send := sent_by(action, rank_of, backward)) is not None:
                count += _GRADIENT if send.kind == "B" else 1 if send.stage in backward else _FROZEN
            if count not in known:
                known[count] = Waiting(count % _FROZEN, count // _FROZEN % _FROZEN, count // _GRADIENT)
    return waiting


def _rank_of_stage(program: Program) -> list[int]:
    holder = {action.stage: rank for rank, actions in program.items() for action in actions}
    return [holder[stage] for stage in range(len(holder))]


# Leaves out the actions of a rank that only repeat situations it has been in before.
#
# What a rank holds depends on how many microbatches are in flight on each of its stages, on which
# stages have gradients, and on how many of its messages wait. A long program is in the same few
# situations again and again.


def without_repeats(actions: Sequence[Action], waiting: Mapping[Action, Waiting] | None = None) -> list[Action]:
    """Returns a part of a rank's actions that runs the same actions in the same situations.

    A situation is, for each stage: the forwards without their backward (B, or W), the I without
    their W, and whether there was a backward; and the messages that wait. In the result, each pair
    of a situation and the kind and stage of the action that is run in it appears in the order in
    which it first appears in `actions`. Microbatches are not renumbered. `waiting`: what waits
    while each of them runs (`schedules.waiting`). None: it does not count.
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
    counts = [] if waiting is None else [waiting[action] for action in actions]
    waits = [(one.activations | one.frozen << bits | one.gradients << 2 * bits) << top for one in counts]
    waits = waits or [0] * len(actions)
    path: list[Action] = []
    held, now = 0, waits[0] if waits else 0
    # Since the last action of `path`: the way to the present situation without its loops, and the
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
            path += way
            way, lengths = [], {now: 0}
        elif now in lengths:
            del way[lengths[now] :]
            while len(lengths) > len(way) + 1:
                lengths.popitem()
        else:
            lengths[now] = len(way)
    return path
