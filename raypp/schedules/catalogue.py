"""Finds schedules by name. raypp's own are the modules of this package that declare a `KIND`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import cast

from raypp.errors import JobError, Problem
from raypp.kinds import SCHEDULES, ScheduleKind
from raypp.schedules.action import Program, with_whole_backwards
from raypp.schedules.custom import from_csv, own_schedule
from raypp.spec.limits import ACTIONS, STAGES

__all__ = ["SCHEDULES", "build_program", "schedule_named", "size_problems"]


def schedule_named(name: str) -> ScheduleKind:
    """Returns the schedule of a name.

    Args:
        name: A registered name, or a user's own schedule: `module.path:function`, or the path of a
            .csv file.

    Raises:
        JobError: There is no such schedule. The message lists the known names and the closest one.
    """
    if name.endswith(".csv"):
        return from_csv(name)
    try:
        kind = SCHEDULES.get(name, key="pipeline.schedule")
        return own_schedule(kind) if kind.own else kind
    except JobError as error:
        raise JobError(replace(problem, key="pipeline.schedule") for problem in error.problems) from error


def build_program(
    name: str, pp: int, stages_per_rank: int, microbatches: int, lookahead: int = 0, *, whole_backwards: bool = False
) -> Program:
    """Builds the compute-only program of a schedule. A user's own program is also checked.

    Args:
        name: A registered name, `module.path:function`, or a .csv file.
        pp: Number of pipeline ranks.
        stages_per_rank: Stages on each rank.
        microbatches: Microbatches per replica and step.
        lookahead: Extra warm-up forwards for each later pipeline rank. Schedules without a warm-up
            ignore it.
        whole_backwards: Compute the gradients of inputs and weights together, also where the
            schedule splits them.

    Raises:
        JobError: There is no such schedule, or it does not support these sizes.
    """
    schedule = schedule_named(name)
    problems = size_problems(schedule, pp, stages_per_rank, microbatches)
    if problems:
        raise JobError(problems)
    program = cast(Program, schedule.build()(pp, stages_per_rank, microbatches, lookahead))
    return with_whole_backwards(program) if whole_backwards else program


def size_problems(schedule: ScheduleKind, pp: int, stages_per_rank: int, microbatches: int) -> list[Problem]:
    """Returns why a schedule cannot run with these sizes; empty if it can."""
    problems = list(too_large(pp, stages_per_rank, microbatches))
    least, most = schedule.stages_per_rank
    if not schedule.allows_stages(stages_per_rank):
        need = str(least) if least == most else f"{least} to {most}"
        others = [kind.name for kind in SCHEDULES.usable() if kind.allows_stages(stages_per_rank)]
        instead = f", or {' or '.join(others)}" if others else ""
        problems.append(
            Problem(
                "pipeline.stages_per_rank",
                f"{schedule.name} takes {need} per rank, not {stages_per_rank}",
                f"use pipeline.stages_per_rank {schedule.nearest_stages(stages_per_rank)}{instead}",
            )
        )
    fewest = schedule.least_microbatches(pp)
    if microbatches < fewest:
        smaller = max((p for p in range(1, pp) if schedule.least_microbatches(p) <= microbatches), default=1)
        others = [kind.name for kind in SCHEDULES.usable() if kind.allows_stages(stages_per_rank)]
        any_number = next((name for name in others if not SCHEDULES.get(name).microbatches_per_rank), "gpipe")
        few = (
            f"{microbatches} {'is' if microbatches == 1 else 'are'} too few for {schedule.name} on {pp} pipeline ranks"
        )
        problems.append(
            Problem(
                "pipeline.microbatches",
                f"{few}: {schedule.reason}",
                f"use at least {fewest}, or mesh.pp {smaller}, or pipeline.schedule {any_number}",
            )
        )
    return problems


def too_large(pp: int, stages_per_rank: int, microbatches: int) -> Iterator[Problem]:
    """Finds sizes that are beyond the limits of every schedule."""
    stages = pp * stages_per_rank
    if stages > STAGES:
        ranks = f"mesh.pp {pp:,} · {stages_per_rank:,} stages per rank" if stages_per_rank > 1 else f"mesh.pp {pp:,}"
        fix = f"use mesh.pp ≤ {max(1, STAGES // stages_per_rank):,}"
        yield Problem("mesh.pp", f"{ranks} are {stages:,} stages; a pipeline has at most {STAGES:,}", fix)
    elif 2 * stages * microbatches > ACTIONS:
        what = f"{microbatches:,} on {stages:,} stage{'s' if stages > 1 else ''} make {2 * stages * microbatches:,} "
        fix = f"use at most {ACTIONS // (2 * stages):,}, with a larger train.micro_batch_size"
        yield Problem("pipeline.microbatches", f"{what}actions; a program has at most {ACTIONS:,}", fix)
