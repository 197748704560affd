"""Simulates torch's Schedule1F1B with given times for forwards, backwards and messages.

In its steady state, a rank sends its last result and receives its next input in one batch, and
waits for both before it computes. A message crosses once both of its ends are posted. Each
direction of each link carries one message at a time; with gloo, which serialises the two directions
of a group, each link does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

Op = tuple[str, int]
"""A send or receive of F or B, such as `("sF", 3)`; or a computation: `("F", 3)`, `("B", 3)`."""


def _line(pp: int, rank: int, microbatches: int) -> list[tuple[list[Op], bool]]:
    """Returns a rank's batches of operations, and whether it waits for each before it continues."""
    warm = min(microbatches, pp - rank)
    line: list[tuple[list[Op], bool]] = []
    for index in range(warm):
        line += [([("rF", index)], True), ([("F", index)], True)]
        if index < warm - 1:
            line.append(([("sF", index)], False))
    sending: Op = ("sF", warm - 1)
    for index in range(microbatches):
        following = warm + index
        line += [([sending, ("rB", index)] if sending[0] == "sF" else [("rB", index)], True), ([("B", index)], True)]
        if following < microbatches:
            line += [([("sB", index), ("rF", following)], True), ([("F", following)], True)]
            sending = "sF", following
        else:
            line.append(([("sB", index)], False))
            sending = "", 0
    return line


def torch_1f1b_s(
    forward: Sequence[float], backward: Sequence[float], microbatches: int, message: float, *, both_ways: bool = True
) -> float:
    """Returns the seconds from the first forward to the last backward.

    Args:
        forward: Seconds of each stage's forward.
        backward: Seconds of each stage's backward.
        microbatches: Of a step.
        message: Seconds of a message.
        both_ways: Whether a link carries a message each way at the same time. gloo's do not.
    """
    pp = len(forward)
    lines = {rank: _line(pp, rank, microbatches) for rank in range(pp)}
    clock, place = dict.fromkeys(lines, 0.0), dict.fromkeys(lines, 0)
    posted: dict[tuple[str, str, int, int], float] = {}
    arrived: dict[tuple[str, int, int], float] = {}
    free: dict[tuple[str, int], float] = defaultdict(float)

    def wire(direction: str, sender: int) -> tuple[str, int]:
        """Returns what carries one message at a time: a direction of a link, or the link."""
        return (direction, sender) if both_ways else ("", sender - (direction == "B"))

    def channel(rank: int, op: Op) -> tuple[str, int, int] | None:
        """Returns (direction, sending rank, microbatch); None at the ends of the pipeline."""
        sender = rank if op[0][0] == "s" else rank + (-1 if op[0] == "rF" else 1)
        receiver = sender + (1 if op[0][1] == "F" else -1)
        return (op[0][1], sender, op[1]) if 0 <= sender < pp and 0 <= receiver < pp else None

    def advance(rank: int) -> bool:
        ops, waits = lines[rank][place[rank]]
        if ops[0][0] in ("F", "B"):
            clock[rank] += forward[rank] if ops[0][0] == "F" else backward[rank]
            return True
        keys = [(op[0][0], key) for op in ops if (key := channel(rank, op)) is not None]
        for half, key in keys:
            posted.setdefault((half, *key), clock[rank])
            if key not in arrived and ("s", *key) in posted and ("r", *key) in posted:
                used = wire(key[0], key[1])
                arrived[key] = free[used] = max(posted["s", *key], posted["r", *key], free[used]) + message
        if waits and any(key not in arrived for _, key in keys):
            return False
        if waits:
            clock[rank] = max([clock[rank], *(arrived[key] for _, key in keys)])
        return True

    while any(place[rank] < len(line) for rank, line in lines.items()):
        moved = False
        for rank, line in lines.items():
            while place[rank] < len(line) and advance(rank):
                place[rank] += 1
                moved = True
        if not moved:
            raise AssertionError("torch's order cannot deadlock")
    return max(clock.values())
