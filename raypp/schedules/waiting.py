"""How many messages of a rank are not known to have arrived, at each of its actions.

A rank holds a message until another one proves that it has arrived: a message from a peer proves
that all that the peer used before it sent this one have (`pipeline.runtime.arrivals`, which
releases them). So the count follows from the program alone. Neither the cable nor the backend
changes it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from raypp.schedules.action import KINDS, Action, Program, stages_with_backward

_Key = tuple[bool, int, int]
"""A message: whether it holds activations, the sending stage, the microbatch."""
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


def waiting_sends(program: Program) -> dict[int, dict[Action, Waiting]]:
    """Returns what waits on each rank while it runs an action, by rank and action."""
    holder = {action[0]: rank for rank, actions in program.items() for action in actions}
    backward = stages_with_backward(program)
    flows = {rank: [_ends(action, holder, backward) for action in actions] for rank, actions in program.items()}
    used: dict[tuple[int, int], list[_Key]] = defaultdict(list)  # by sender and user, in the order of use
    proven: dict[_Key, int] = {}  # how many messages of its receiver the sender has used
    for rank, flow in flows.items():
        for source, use, target, send in flow:
            if use is not None:
                used[source, rank].append(use)
            if send is not None:
                proven[send] = len(used[target, rank])
    return {rank: _on_rank(rank, actions, flows[rank], used, proven, backward) for rank, actions in program.items()}


_Flow = tuple[int, _Key | None, int, _Key | None]
"""The rank of the message that an action uses, that message, the receiver of the one it sends, and
that one. None: its input or its result stays on its rank."""


def _ends(action: Action, holder: dict[int, int], backward: set[int]) -> _Flow:
    """Returns the flow of an action, given the rank of each stage and those with a backward."""
    stage, kind, microbatch = action
    own = holder[stage]
    if kind == "W":
        return own, None, own, None
    forward = kind == "F"
    before, after = (stage - 1, stage + 1) if forward else (stage + 1, stage - 1)
    source, target = holder.get(before, own), holder.get(after, own)
    use = (forward, before, microbatch) if source != own else None
    send = (forward, stage, microbatch) if target != own and (forward or after in backward) else None
    return source, use, target, send


def _on_rank(
    rank: int,
    actions: Sequence[Action],
    flow: Sequence[_Flow],
    used: Mapping[tuple[int, int], Sequence[_Key]],
    proven: Mapping[_Key, int],
    backward: set[int],
) -> dict[Action, Waiting]:
    """Returns what waits on a rank while it runs each of its actions."""

    def part(message: _Key) -> int:
        """Returns what a message adds to the counts."""
        return _GRADIENT if not message[0] else 1 if message[1] in backward else _FROZEN

    sent = {user: messages for (sender, user), messages in used.items() if sender == rank}
    released = dict.fromkeys(sent, 0)
    # The counts are one number, and each combination of them is one object.
    count, known = 0, {0: Waiting()}
    by_action: dict[Action, Waiting] = {}
    for action, (source, use, _, send) in zip(actions, flow, strict=True):
        by_action[action] = known[count]
        if use is not None and (last := proven[use]) > (first := released.get(source, 0)):
            for message in sent[source][first:last]:
                count -= part(message)
            released[source] = last
        if send is not None:
            count += part(send)
        if count not in known:
            known[count] = Waiting(count % _FROZEN, count // _FROZEN % _FROZEN, count // _GRADIENT)
    return by_action


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


def _number(waiting: Waiting, bits: int) -> int:
    """Returns the counts as one number, with `bits` bits for each."""
    return waiting.activations | waiting.frozen << bits | waiting.gradients << 2 * bits
