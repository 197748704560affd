"""The schedules there are, by name."""

from __future__ import annotations

from dataclasses import replace

from raypp.errors import JobError, Problem
from raypp.registry import Registry
from raypp.schedules.action import Program
from raypp.schedules.info import ScheduleInfo

SCHEDULES = Registry("schedule")
"""Schedules that train; `forward_only`, which does not, is asked for by those who evaluate."""

for _name, _module in (
    ("gpipe", "gpipe"),
    ("1f1b", "one_f_one_b"),
    ("interleaved_1f1b", "interleaved_1f1b"),
    ("looped_bfs", "looped_bfs"),
    ("interleaved_zero_bubble", "interleaved_zero_bubble"),
    ("zbv", "zbv"),
    ("dualpipev", "dualpipev"),
):
    SCHEDULES.register(_name, f"raypp.schedules.{_module}:SCHEDULE")


def schedule_named(name: str) -> ScheduleInfo:
    """The schedule of that name, or a user's own: `module.path:function`, or the path of a .csv file.

    Raises:
        JobError: There is none; the message lists those there are and the closest name.
    """
    from raypp.schedules.custom import from_csv, from_function

    if name.endswith(".csv"):
        return from_csv(name)
    try:
        built = SCHEDULES.get(name, key="pipeline.schedule").build()
    except JobError as error:
        raise JobError(replace(problem, key="pipeline.schedule") for problem in error.problems) from error
    return built if isinstance(built, ScheduleInfo) else from_function(name, built)


def build_program(name: str, pp: int, stages_per_rank: int, microbatches: int, lookahead: int = 0) -> Program:
    """The compute-only program of a schedule, checked when it is a user's own.

    Args:
        name: A registered name, `module.path:function`, or a .csv file.
        pp: Pipeline ranks.
        stages_per_rank: Stages on each.
        microbatches: Per replica and step.
        lookahead: Extra warm-up forwards per rank below; schedules without a warm-up ignore it.

    Raises:
        JobError: No such schedule, or it cannot do these sizes.
    """
    schedule = schedule_named(name)
    problems = size_problems(schedule, pp, stages_per_rank, microbatches)
    if problems:
        raise JobError(problems)
    return schedule(pp, stages_per_rank, microbatches, lookahead)


def size_problems(schedule: ScheduleInfo, pp: int, stages_per_rank: int, microbatches: int) -> list[Problem]:
    """Why a schedule cannot run with these sizes; empty when it can."""
    problems = []
    least, most = schedule.stages_per_rank
    if not schedule.allows_stages(stages_per_rank):
        need = str(least) if least == most else f"{least} to {most}"
        others = [name for name in SCHEDULES.names() if schedule_named(name).allows_stages(stages_per_rank)]
        instead = f", or {' or '.join(others)}" if others else ""
        problems.append(
            Problem(
                "pipeline.stages_per_rank",
                f"{schedule.name} takes {need} per rank, not {stages_per_rank}",
                f"use pipeline.stages_per_rank {min(max(stages_per_rank, least), most)}{instead}",
            )
        )
    fewest = schedule.least_microbatches(pp)
    if microbatches < fewest:
        smaller = max((p for p in range(1, pp) if schedule.least_microbatches(p) <= microbatches), default=1)
        any_number = "gpipe" if stages_per_rank == 1 else "looped_bfs"
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
