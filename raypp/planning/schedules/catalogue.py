"""Finds schedules by name, raypp's own (modules with a `KIND`) and a user's, which it checks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal, cast

from raypp.errors import JobError, Problem, origin_in_words
from raypp.job.limits import ACTIONS, STAGES
from raypp.job.small_files import here
from raypp.kinds import SCHEDULES, ScheduleKind
from raypp.planning.schedules.action import Action, Program, parse_actions, with_whole_backwards
from raypp.planning.seating import place_stages
from raypp.untrusted.files import read_file

__all__ = ["SCHEDULES", "build_program", "schedule_named", "size_problems"]


def schedule_named(name: str) -> ScheduleKind:
    """Returns the schedule of a name. `name`: a registered name, or a user's own schedule:
    `module.path:function`, or the path of a .csv file. Raises JobError: there is no such schedule.
    The message lists the known names and the closest one."""
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
        alternatives = f", or {' or '.join(others)}" if others else ""
        problems.append(
            Problem(
                "pipeline.stages_per_rank",
                f"{schedule.name} takes {need} per rank, not {stages_per_rank}",
                f"use pipeline.stages_per_rank {schedule.nearest_stages(stages_per_rank)}{alternatives}",
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
        fault = f"{microbatches:,} on {stages:,} stage{'s' if stages > 1 else ''} make {2 * stages * microbatches:,} "
        fix = f"use at most {ACTIONS // (2 * stages):,}, with a larger train.micro_batch_size"
        yield Problem("pipeline.microbatches", f"{fault}actions; a program has at most {ACTIONS:,}", fix)


_KEY = "pipeline.schedule"
_SHOWN = 5
_FILE_BYTES = 32 << 20


def own_schedule(kind: ScheduleKind) -> ScheduleKind:
    """Wraps a user's own schedule so that its programs are checked. The user's builder,
    `function(pp, stages_per_rank, microbatches, lookahead=0)`, returns a list of actions for every
    rank (`Action`, or text such as `0F1`). The attribute `placement = "v"` of the function selects
    the V placement. Raises JobError: the schedule cannot be imported, or is not a function."""
    name, function = kind.name, kind.build()
    if not callable(function):
        fix = "name a function of pp, stages_per_rank, microbatches and lookahead"
        raise JobError(Problem(_KEY, f"{name} is not a function", fix))
    placement: Literal["loop", "v"] = "v" if getattr(function, "placement", kind.placement) == "v" else "loop"

    def build(pp: int, stages_per_rank: int, microbatches: int, lookahead: int = 0) -> Program:
        try:
            made = function(pp, stages_per_rank, microbatches, lookahead)
        except JobError:
            raise
        except Exception as error:  # user code may raise anything; report it as a problem of the job
            asked = f"pp {pp}, stages_per_rank {stages_per_rank}, microbatches {microbatches}, lookahead {lookahead}"
            fault = f"{name}, called with {asked}, raised {origin_in_words(error)}"
            fix = "name a function of pp, stages_per_rank, microbatches and lookahead"
            raise JobError(Problem(_KEY, fault, fix)) from error
        try:
            rows = {
                int(rank): [item if isinstance(item, Action) else Action.parse(str(item)) for item in actions]
                for rank, actions in dict(made).items()
            }
        except (TypeError, ValueError) as error:
            fix = "return {rank: ['0F0', '0B0', ...], ...}"
            raise JobError(Problem(_KEY, f"{name} did not return a valid program: {error}", fix)) from error
        return _checked(name, rows, pp, stages_per_rank, microbatches, placement)

    return replace(kind, builder=build, placement=placement)


def from_csv(path: str) -> ScheduleKind:
    """Loads a schedule from a CSV file: one row per rank, in rank order, of actions such as `0F1`.
    Empty cells are allowed; they mark where a rank waits. Stages may be placed in a loop or in a V;
    the rows determine which. Raises JobError: the file cannot be read, or a cell is not an
    action."""
    try:
        lines = read_file(here(Path(path)), _FILE_BYTES, JobError, _KEY).decode().splitlines()
    except UnicodeDecodeError as error:
        raise JobError(Problem(_KEY, f"cannot read {path}: {error}", "save the file as UTF-8")) from error
    rows: dict[int, list[Action]] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip(" ,"):
            continue
        try:
            rows[len(rows)] = parse_actions(line)
        except ValueError as error:
            raise JobError(
                Problem(_KEY, f"{path}:{number}: {error}", "write one row per rank, e.g. 0F0,0F1,0B0,0B1")
            ) from error
    last = 1 + max((action.stage for actions in rows.values() for action in actions), default=0)
    first_row = {action.stage for action in rows.get(0, ())}
    placement: Literal["loop", "v"] = "v" if last > len(rows) > 1 and last - 1 in first_row else "loop"

    def build(pp: int, stages_per_rank: int, microbatches: int, lookahead: int = 0) -> Program:
        return _checked(path, rows, pp, stages_per_rank, microbatches, placement)

    return replace(ScheduleKind.undeclared(path), builder=build, placement=placement, own=True)


def _checked(
    name: str,
    rows: dict[int, list[Action]],
    pp: int,
    stages_per_rank: int,
    microbatches: int,
    placement: Literal["loop", "v"],
) -> Program:
    from raypp.planning.schedules.validity import check_program

    wrong = check_program(rows, place_stages(pp, pp * stages_per_rank, placement), microbatches)
    if wrong:
        more = f" (and {len(wrong) - _SHOWN} more)" if len(wrong) > _SHOWN else ""
        fault = f"{name} cannot run with {pp} ranks of {stages_per_rank} stages and {microbatches} microbatches: "
        fix = "give each stage F, then B (or I and W), of every microbatch, on the rank that holds it"
        raise JobError(Problem(_KEY, fault + "; ".join(wrong[:_SHOWN]) + more, fix))
    return rows


def build_forward_only(
    pp: int, stages_per_rank: int, microbatches: int, placement: Literal["loop", "v"] = "loop"
) -> Program:
    """Builds the program of every rank, with the stage placement of a training schedule.
    `placement`: "loop": stage s is on rank s mod pp; "v": rank r has the stages r and 2·pp - 1 -
    r."""
    return _v(pp, microbatches) if placement == "v" else _loop(pp, stages_per_rank, microbatches)


def _loop(pp: int, stages_per_rank: int, microbatches: int) -> Program:
    """Runs rounds of `pp` microbatches through all stages, so no rank waits for the way round."""
    rounds = [range(start, min(start + pp, microbatches)) for start in range(0, microbatches, pp)]
    turns = range(stages_per_rank)
    return {
        rank: [Action(rank + turn * pp, "F", index) for part in rounds for turn in turns for index in part]
        for rank in range(pp)
    }


def _v(pp: int, microbatches: int) -> Program:
    """Builds the program of the V placement. A microbatch returns to rank r after 2·(pp - r) - 1
    forwards there. Then its two stages alternate."""
    program: dict[int, list[Action]] = {}
    for rank in range(pp):
        ahead = min(microbatches, 2 * (pp - rank) - 1)
        actions = [Action(rank, "F", index) for index in range(ahead)]
        for index in range(microbatches):
            actions.append(Action(2 * pp - 1 - rank, "F", index))
            if ahead + index < microbatches:
                actions.append(Action(rank, "F", ahead + index))
        program[rank] = actions
    return program
