"""Draws a program as text: one row per rank, time from left to right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from raypp.schedules.action import Action, Program
from raypp.schedules.simulate import Slot, StageTimes, Timeline, simulate


def draw(program: Program, max_width: int = 110) -> str:
    """Draws a program with equal stages, backwards twice as long as forwards, and free links.

    `F0` is the forward of microbatch 0, `B0` its backward, `I0` and `W0` the parts of a split
    backward. With several stages per rank, the stage comes first (`4F0`). `─` continues the action
    to its left, `·` marks an idle rank.

    Args:
        program: A program in which `check_program` finds no problem.
        max_width: Characters per line. Longer lines are cut, and a last line says so.
    """
    stages = 1 + max(action.stage for actions in program.values() for action in actions)
    return draw_timeline(simulate(program, StageTimes.equal(stages)), 1.0, max_width)


def draw_timeline(timeline: Timeline, unit: float, max_width: int = 110) -> str:
    """Draws a timeline, one column per `unit` of time."""
    ranks = sorted(timeline.slots)
    several = any(len({slot.action.stage for slot in timeline.slots[rank]}) > 1 for rank in ranks)
    width = 2 + most_digits(timeline.slots, several)  # the kind, and a blank
    head = max(len(f"pp{rank}") for rank in ranks) + 1
    columns = round(timeline.makespan / unit)
    shown = min(columns, max(1, (max_width - head) // width))
    lines = []
    drawn = min(columns, shown + 1)  # one more: it may continue the action in the last one that is shown
    for rank in ranks:
        cells = ["·"] * drawn
        for slot in timeline.slots[rank]:
            first, last = round(slot.start / unit), round(slot.end / unit)
            if first >= drawn:
                break
            last = min(last, drawn)
            cells[first:last] = ([_label(slot.action, several)] + ["─" * width] * (last - first))[: last - first]
        row = "".join(
            cell.ljust(width, "─" if after.startswith("─") else " ")
            for cell, after in zip(cells, [*cells[1:], ""], strict=True)
        )
        # The last column of an action ends in a blank, to separate it from the next action.
        lines.append(f"pp{rank}".ljust(head) + _apart(cells, row, width)[: shown * width].rstrip())
    if shown < columns:
        lines.append(f"{'':{head}}… the first {shown} of {columns} slots")
    return "\n".join(lines)


def most_digits(ranks: Mapping[int, Sequence[Slot]], several: bool) -> int:
    """Returns the most digits of a microbatch, together with those of its stage if `several`."""
    last: dict[int, int] = {}
    for row in ranks.values():
        for (stage, _, microbatch), _, _ in row:
            if microbatch > last.get(stage, -1):
                last[stage] = microbatch
    digits = (len(str(microbatch)) + (len(str(stage)) if several else 0) for stage, microbatch in last.items())
    return max(digits, default=1)


def _apart(cells: list[str], row: str, width: int) -> str:
    characters = list(row)
    for index, cell in enumerate(cells):
        ends = index + 1 == len(cells) or not cells[index + 1].startswith("─")
        if cell.startswith("─") and ends:
            characters[(index + 1) * width - 1] = " "
    return "".join(characters)


def _label(action: Action, several: bool) -> str:
    return str(action) if several else f"{action.kind}{action.microbatch}"
