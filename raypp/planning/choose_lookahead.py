"""Chooses how many extra warm-up forwards hide the links: by simulation, limited by memory."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from raypp.errors import JobError
from raypp.planning.activations import Kind
from raypp.planning.memory import rank_memory
from raypp.planning.resolve import ResolvedPipeline
from raypp.schedules.simulate import Simulator, StageTimes, Timeline
from raypp.spec.job import Job

WORTH = 0.01
"""A deeper warm-up must shorten a step by this fraction: its memory is certain, its gain is only
predicted."""

_PATIENCE = 3
"""Stop after this many deeper programs in a row without a gain."""

_MOST_SIMULATED = 300_000
"""Actions of all programs together beyond which no deeper one is tried: a simulation takes time."""

_DRAWS = 6
"""Simulations of a program whose actions vary, each with other times."""
_BY_EVENTS = 5
"""How much longer a simulation takes that follows events: with shared cards, or varying times."""


@dataclass(frozen=True)
class Depth:
    """One depth of the warm-up.

    Attributes:
        lookahead: Extra forwards per rank below.
        step_s: Simulated time of the program; a mean over several if the times vary.
        in_flight: Largest number of microbatches in flight, by stage.
        simulator: Of the program.
        timeline: Its simulation.
    """

    lookahead: int
    step_s: float
    in_flight: tuple[int, ...]
    simulator: Simulator = field(repr=False)
    timeline: Timeline = field(repr=False)


def depths(
    simulator: Callable[[int], Simulator],
    microbatches: int,
    times: StageTimes,
    most_in_flight: Sequence[int] | None = None,
    fits: Callable[[Simulator], bool] | None = None,
) -> list[Depth]:
    """Returns the depths, from 0, that change the program, fit into memory, and may bring a gain.

    Of a program with very many actions, only the first few.

    Args:
        simulator: Returns the simulator of the program with a depth, or raises JobError
            (`ResolvedPipeline.simulator`).
        microbatches: Per replica and step.
        times: Seconds of every stage and of every message.
        most_in_flight: Microbatches in flight that each stage has memory for, where that was
            measured; None: any number.
        fits: Whether a program fits into memory by plan (`fits_by_plan`); None: any does. Depth 0
            is always included, because it is what the job would do anyway.
    """
    found: list[Depth] = []
    repeats = _DRAWS * _BY_EVENTS if times.spread or times.link_spread else _BY_EVENTS if times.cards else 1
    for lookahead in range(microbatches):
        before = found[-1].simulator if found else None
        if before is not None and (lookahead + 1) * before.actions * repeats > _MOST_SIMULATED:
            break
        try:
            one = simulator(lookahead)
        except JobError:
            break
        if before is not None and one.program == before.program:
            break
        if found and fits is not None and not fits(one):
            break
        timeline = one.run(times)
        in_flight = tuple(timeline.in_flight)
        if found and most_in_flight is not None and any(n > m for n, m in zip(in_flight, most_in_flight, strict=True)):
            break
        step_s = statistics.mean(one.run_varied(times, _DRAWS))
        found.append(Depth(lookahead, step_s, in_flight, one, timeline))
        if len(found) > _PATIENCE and found[-1].step_s >= found[-1 - _PATIENCE].step_s * (1 - WORTH / 10):
            break
    return found


def fits_by_plan(job: Job, pipeline: ResolvedPipeline, memory: int, kind: Kind) -> Callable[[Simulator], bool] | None:
    """Returns a function that tells whether every rank's planned memory suffices for a program.

    The plan, the search for changes that fit, and the ranks of a run ask it.

    Args:
        job: The job.
        pipeline: Its pipeline; the program may have another depth.
        memory: Bytes of a device; 0: unknown, so any program fits (None).
        kind: The kind of device.
    """
    if not memory:
        return None
    ranks = list(enumerate(pipeline.stages_of_rank))

    def fits(one: Simulator) -> bool:
        return all(
            rank_memory(job, stages, pipeline.cut, one.situations[rank], one.waiting[rank], kind).total <= memory
            for rank, stages in ranks
        )

    return fits


def best_depth(found: Sequence[Depth]) -> Depth:
    """Returns the shallowest depth whose step is at most `WORTH` longer than the shortest one."""
    shortest = min(depth.step_s for depth in found)
    return next(depth for depth in found if depth.step_s <= shortest * (1 + WORTH))
