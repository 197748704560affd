"""How long torch's Schedule1F1B takes when forwards, backwards and messages take known times: it waits for messages.

In its steady state a rank sends what it has just computed and receives what it needs next in one batch, and waits for
both before it computes. A message crosses once both its ends were posted; each direction of each link carries one at a
time.
"""

from __future__ import annotations

from collections import defaultdict

Op = tuple[str, int]
"""send or recv, of F or B: `("sF", 3)`; or `("F", 3)`, `("B", 3)`: compute."""


def _line(pp: int, rank: int, microbatches: int) -> list[tuple[list[Op], bool]]:
    """A rank's batches of operations, and whether it waits for them before it goes on."""
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


def torch_1f1b_s(pp: int, microbatches: int, forward: float, backward: float, message: float) -> float:
    """Seconds from the first forward to the last backward."""
    lines = {rank: _line(pp, rank, microbatches) for rank in range(pp)}
    clock, place = dict.fromkeys(lines, 0.0), dict.fromkeys(lines, 0)
    posted: dict[tuple[str, str, int, int], float] = {}
    arrived: dict[tuple[str, int, int], float] = {}
    free: dict[tuple[str, int], float] = defaultdict(float)

    def channel(rank: int, op: Op) -> tuple[str, int, int] | None:
        """(direction, sending rank, microbatch); None at the ends of the pipeline."""
        sender = rank if op[0][0] == "s" else rank + (-1 if op[0] == "rF" else 1)
        receiver = sender + (1 if op[0][1] == "F" else -1)
        return (op[0][1], sender, op[1]) if 0 <= sender < pp and 0 <= receiver < pp else None

    def advance(rank: int) -> bool:
        ops, waits = lines[rank][place[rank]]
        if ops[0][0] in ("F", "B"):
            clock[rank] += forward if ops[0][0] == "F" else backward
            return True
        keys = [(op[0][0], key) for op in ops if (key := channel(rank, op)) is not None]
        for half, key in keys:
            posted.setdefault((half, *key), clock[rank])
            if key not in arrived and ("s", *key) in posted and ("r", *key) in posted:
                begin = max(posted["s", *key], posted["r", *key], free[key[0], key[1]])
                arrived[key] = free[key[0], key[1]] = begin + message
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
            raise AssertionError("torch's order cannot hang")
    return max(clock.values())
