"""Draws a program as text: one row per rank, time from left to right."""

from collections.abc import Iterator, Mapping, Sequence

from raypp.planning.schedules.action import Program
from raypp.planning.schedules.simulate import Slot, StageTimes, simulate

FILLS = {"F": "", "B": "━", "I": "╌", "W": "═"}
NAMES = {"F": "forward", "B": "backward", "I": "gradient of the input", "W": "gradient of the weights"}
IDLE = "·"
WIDTH = 110

Piece = tuple[str, str]
"""Text, and what it is: the kind of an action, `rank`, or empty."""


def draw(program: Program, width: int = WIDTH) -> str:
    """Draws a program with equal stages, backwards twice as long as forwards, and free links.
    `program`: a program in which `check_program` finds no problem. `width`: as for `drawn`."""
    stages = 1 + max(action.stage for actions in program.values() for action in actions)
    return "".join(text for text, _ in drawn(simulate(program, StageTimes.equal(stages)).slots, width))


def drawn(ranks: Mapping[int, Sequence[Slot]], width: int = WIDTH) -> Iterator[Piece]:
    """Draws the actions of each pipeline rank over time, and what the signs mean. A forward is
    shown as its microbatch's number (`stage.number` if a rank has several stages), a backward as
    its number followed by a bar, idle time as dots. A chart wider than `width` columns is truncated
    with `…`. `ranks`: each rank's actions, with times in units of a forward."""
    several = any(len({slot.action.stage for slot in row}) > 1 for row in ranks.values())
    end = max((row[-1].end for row in ranks.values() if row), default=0.0)
    head = max((len(f"pp{rank}") for rank in ranks), default=0) + 2
    room = max(width - head, 8)
    longest = _most_digits(ranks, several) + several  # a dot between stage and number
    # Columns per unit of time: a label and a space, and one more if the whole chart still fits.
    scale = longest + 2 if end * (longest + 2) <= room else longest + 1
    for rank, row in ranks.items():
        yield f"{f'pp{rank}':<{head}}", "rank"
        # One more column shows that it is truncated.
        yield from _cut(list(_line(row, several, min(round(end * scale), room + 1), scale)), room)
        yield "\n", ""
    yield " " * head, ""
    kinds = {slot.action.kind for row in ranks.values() for slot in row}
    for kind in FILLS:
        if kind in kinds:
            yield f"0{FILLS[kind] * 2}", kind
            yield f" {NAMES[kind]}   ", ""
    yield f"{IDLE} idle" + ("   … truncated" if end * scale > room else ""), ""


def _line(row: Sequence[Slot], several: bool, columns: int, scale: int) -> Iterator[Piece]:
    drawn = 0
    for slot in row:
        start, end = round(slot.start * scale), round(slot.end * scale)
        if start >= columns:
            break
        yield _idle(drawn, start, scale), ""
        action, fill = slot.action, FILLS[slot.action.kind]
        label = f"{action.stage}.{action.microbatch}" if several else str(action.microbatch)
        cell = (label.ljust(end - start - 1, fill) if fill else label).ljust(end - start)
        yield cell, action.kind
        drawn = max(drawn, start) + len(cell)
    yield _idle(drawn, columns, scale), ""


def _idle(start: int, end: int, scale: int) -> str:
    """Draws a dot for each idle unit of time, in the columns where numbers would begin."""
    return "".join(IDLE if column % scale == 0 else " " for column in range(start, end))


def _cut(line: Sequence[Piece], room: int) -> Iterator[Piece]:
    longer = sum(len(text) for text, _ in line) > room
    left = room - longer
    for text, kind in line:
        yield text[:left], kind
        left -= len(text[:left])
    if longer:
        yield "…", ""


def _most_digits(ranks: Mapping[int, Sequence[Slot]], several: bool) -> int:
    """Returns the most digits of a microbatch, together with those of its stage if `several`."""
    last: dict[int, int] = {}
    for row in ranks.values():
        for (stage, _, microbatch), _, _ in row:
            if microbatch > last.get(stage, -1):
                last[stage] = microbatch
    digits = (len(str(microbatch)) + (len(str(stage)) if several else 0) for stage, microbatch in last.items())
    return max(digits, default=1)
