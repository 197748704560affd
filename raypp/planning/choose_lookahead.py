"""How many extra warm-up forwards hide the links: the simulator decides, memory limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from raypp.errors import JobError
from raypp.schedules.catalogue import build_program
from raypp.schedules.simulate import StageTimes, simulate

WORTH = 0.01
"""A deeper warm-up must make a step this much shorter: its memory is certain, its gain is computed."""

_PATIENCE = 3
"""Deeper programs are not tried once so many in a row brought nothing."""


@dataclass(frozen=True)
class Depth:
    """One depth of the warm-up.

    Attributes:
        lookahead: Extra forwards per rank below.
        step_s: Simulated time of the program.
        in_flight: Most microbatches in flight, by stage.
    """

    lookahead: int
    step_s: float
    in_flight: tuple[int, ...]


def depths(
    schedule: str,
    pp: int,
    stages_per_rank: int,
    microbatches: int,
    times: StageTimes,
    most_in_flight: Sequence[int] | None = None,
) -> list[Depth]:
    """The depths that change the program, fit, and may still gain something, from 0.

    Args:
        schedule: A registered name, `module:function` or CSV file.
        pp: Pipeline ranks.
        stages_per_rank: Stages on each.
        microbatches: Per replica and step.
        times: Seconds of every stage and of every message.
        most_in_flight: Microbatches in flight that each stage has memory for; None: any number. Depth 0 is always in
            the answer: it is what the job would do anyway.
    """
    found: list[Depth] = []
    before = None
    for lookahead in range(microbatches):
        try:
            program = build_program(schedule, pp, stages_per_rank, microbatches, lookahead)
        except JobError:
            break
        if program == before:
            break
        before = program
        timeline = simulate(program, times)
        in_flight = tuple(timeline.in_flight)
        if found and most_in_flight is not None and any(n > m for n, m in zip(in_flight, most_in_flight, strict=True)):
            break
        found.append(Depth(lookahead, timeline.makespan, in_flight))
        if len(found) > _PATIENCE and found[-1].step_s >= found[-1 - _PATIENCE].step_s * (1 - WORTH / 10):
            break
    return found


def best_depth(found: Sequence[Depth]) -> Depth:
    """The shallowest depth whose step is at most `WORTH` longer than the shortest one."""
    shortest = min(depth.step_s for depth in found)
    return next(depth for depth in found if depth.step_s <= shortest * (1 + WORTH))
