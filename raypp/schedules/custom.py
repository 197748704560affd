"""Loads a user's own schedule, a function or a table of actions, and checks it before use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from raypp.errors import JobError, Problem, in_words
from raypp.kinds import ScheduleKind
from raypp.schedules.action import Action, Program, parse_actions
from raypp.schedules.validity import check_program
from raypp.untrusted.files import read_file

_KEY = "pipeline.schedule"
_SHOWN = 5
_FILE_BYTES = 32 << 20


def own_schedule(kind: ScheduleKind) -> ScheduleKind:
    """Wraps a user's own schedule so that its programs are checked.

    The user's builder, `function(pp, stages_per_rank, microbatches, lookahead=0)`, returns a list
    of actions for every rank (`Action`, or text such as `0F1`). The attribute `placement = "v"` of
    the function selects the V placement.

    Raises:
        JobError: The schedule cannot be imported, or is not a function.
    """
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
            what = f"{name} raised {in_words(error)} (called with {asked})"
            fix = "name a function of pp, stages_per_rank, microbatches and lookahead"
            raise JobError(Problem(_KEY, what, fix)) from error
        try:
            rows = {int(rank): [_action(item) for item in actions] for rank, actions in dict(made).items()}
        except (TypeError, ValueError) as error:
            fix = "return {rank: ['0F0', '0B0', ...], ...}"
            raise JobError(Problem(_KEY, f"{name} did not return a valid program: {error}", fix)) from error
        return _checked(name, rows, pp, stages_per_rank, microbatches, placement)

    return replace(kind, builder=build, placement=placement)


def from_csv(path: str) -> ScheduleKind:
    """Loads a schedule from a CSV file: one row per rank, in rank order, of actions such as `0F1`.

    Empty cells are allowed; they mark where a rank waits. Stages may be placed in a loop or in a V;
    the rows determine which.

    Raises:
        JobError: The file cannot be read, or a cell is not an action.
    """
    try:
        lines = read_file(Path(path), _FILE_BYTES, JobError, _KEY).decode().splitlines()
    except UnicodeDecodeError as error:
        raise JobError(Problem(_KEY, f"cannot read {path}: {error}", "name a file that every node can read")) from error
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


def _action(item: Any) -> Action:
    return item if isinstance(item, Action) else Action.parse(str(item))


def _checked(
    name: str,
    rows: dict[int, list[Action]],
    pp: int,
    stages_per_rank: int,
    microbatches: int,
    placement: Literal["loop", "v"],
) -> Program:
    wrong = check_program(rows, _stages(pp, stages_per_rank, placement), microbatches)
    if wrong:
        more = f" (and {len(wrong) - _SHOWN} more)" if len(wrong) > _SHOWN else ""
        what = f"{name} cannot run with {pp} ranks of {stages_per_rank} stages and {microbatches} microbatches: "
        fix = "give each stage F, then B (or I and W), of every microbatch, on the rank that holds it"
        raise JobError(Problem(_KEY, what + "; ".join(wrong[:_SHOWN]) + more, fix))
    return rows


def _stages(pp: int, stages_per_rank: int, placement: Literal["loop", "v"]) -> Sequence[Sequence[int]]:
    turns = range(stages_per_rank)
    return [[t * pp + (pp - 1 - r if placement == "v" and t % 2 else r) for t in turns] for r in range(pp)]
