"""Finds schedules by name, raypp's own (modules with a `KIND`) and a user's; checks programs."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Literal, cast

from raypp.errors import JobError, Problem, origin_in_words
from raypp.job.limits import ACTIONS, STAGES
from raypp.job.small_files import here
from raypp.kinds import SCHEDULES, ScheduleKind
from raypp.planning.schedules.action import Action, Program, parse_actions, with_whole_backwards
from raypp.planning.schedules.simulate import DeadlockError, Simulator
from raypp.planning.seating import place_stages
from raypp.untrusted.files import read_file

__all__ = ["SCHEDULES", "build_program", "schedule_named", "size_problems"]

_LISTED = 16


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
    Empty cells are allowed; they mark where a rank waits. The rows tell whether stages are placed
    in a loop or a V. Raises JobError: the file cannot be read, or a cell is no action."""
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
    """Builds the program of every rank, with a training schedule's placement. `placement`: "loop":
    stage s is on rank s mod pp; "v": rank r has the stages r and 2·pp - 1 - r."""
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


def check_program(
    program: Program, placement: Sequence[Sequence[int]], microbatches: int, *, trains: bool = True
) -> list[str]:
    """Describes the problems of a program; empty if there are none.

    Every stage must run each microbatch forward exactly once, then backward exactly once (B, or I
    and later W), on the rank that holds it. Within a stage, forwards and backwards must be in
    microbatch order, so that gradients are added in the same order on every mesh. The ranks must
    not deadlock. `trains`: False for a forward-only program.
    """
    faults: list[str] = []
    if sorted(program) != list(range(len(placement))):
        ranks = f"ranks {sorted(program)}" if len(program) <= _LISTED else f"{len(program):,} ranks"
        faults.append(f"the program has {ranks}, the pipeline has 0 to {len(placement) - 1}")
        return faults
    owner = {stage: holder for holder, held in enumerate(placement) for stage in held}
    for rank, stages in enumerate(placement):
        faults += _on_rank(rank, program[rank], set(stages), owner)
        of_stage: dict[int, list[Action]] = defaultdict(list)
        for action in program[rank]:
            of_stage[action.stage].append(action)
        for stage in stages:
            faults += _of_stage(stage, of_stage[stage], microbatches, trains)
    if not faults:
        try:
            _ = Simulator(program).in_order
        except DeadlockError as error:
            faults = error.hangs
    return faults


def _on_rank(rank: int, actions: Sequence[Action], stages: set[int], owner: Mapping[int, int]) -> list[str]:
    faults = []
    for action in actions:
        if action.stage not in owner:
            faults.append(f"rank {rank} has {action}, but there is no stage {action.stage}")
        elif action.stage not in stages:
            faults.append(f"rank {rank} has {action}, but stage {action.stage} is on rank {owner[action.stage]}")
    return faults


def _of_stage(stage: int, actions: Sequence[Action], microbatches: int, trains: bool) -> list[str]:
    faults = []
    position: dict[tuple[str, int], int] = {}
    for index, action in enumerate(actions):
        if not 0 <= action.microbatch < microbatches:
            faults.append(f"{action}: there are only microbatches 0 to {microbatches - 1}")
        elif (action.kind, action.microbatch) in position:
            faults.append(f"{action} appears twice")
        else:
            position[action.kind, action.microbatch] = index
    for microbatch in range(microbatches):
        at = {kind: position[kind, microbatch] for kind in "FBIW" if (kind, microbatch) in position}
        faults += _of_microbatch(stage, microbatch, at, trains)
    for kind, noun in (("F", "forward"), ("B", "backward"), ("I", "backward"), ("W", "weight gradient")):
        order = [action.microbatch for action in actions if action.kind == kind]
        late = next((b for a, b in pairwise(order) if b < a), None)
        if late is not None:
            faults.append(f"stage {stage}: the {noun} of microbatch {late} comes after that of a later microbatch")
    return faults


def _of_microbatch(stage: int, microbatch: int, at: dict[str, int], trains: bool) -> list[str]:
    name = f"stage {stage}, microbatch {microbatch}"
    faults = [] if "F" in at else [f"{name}: there is no forward"]
    backward = sorted(set(at) - {"F"})
    if not trains:
        return [*faults, *(f"{name}: {kind} in a forward-only program" for kind in backward)]
    if not backward:
        return [*faults, f"{name}: there is no backward"]
    if backward not in (["B"], ["I", "W"]):
        return [*faults, f"{name}: the backward is {' and '.join(backward)}; it must be B, or I and W"]
    first = backward[0]
    if "F" in at and at[first] < at["F"]:
        faults.append(f"{name}: {first} comes before the forward")
    if "I" in at and at["W"] < at["I"]:
        faults.append(f"{name}: W comes before I")
    return faults
