"""Checks that a program computes everything exactly once, in an order that can run."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from itertools import pairwise

from raypp.schedules.action import Action, Program

_LISTED = 16


def check_program(
    program: Program, placement: Sequence[Sequence[int]], microbatches: int, *, trains: bool = True
) -> list[str]:
    """Describes the problems of a program; empty if there are none.

    Every stage must run each microbatch forward exactly once, then backward exactly once (B, or I
    and later W), on the rank that holds it. Within a stage, forwards and backwards must be in
    microbatch order, so that gradients are added in the same order on every mesh. The ranks must
    not deadlock.

    Args:
        program: Actions of every rank.
        placement: Stages of every rank.
        microbatches: Microbatches per step.
        trains: False for a forward-only program.
    """
    found: list[str] = []
    if sorted(program) != list(range(len(placement))):
        ranks = f"ranks {sorted(program)}" if len(program) <= _LISTED else f"{len(program):,} ranks"
        found.append(f"the program has {ranks}, the pipeline has 0 to {len(placement) - 1}")
        return found
    owner = {stage: holder for holder, held in enumerate(placement) for stage in held}
    for rank, stages in enumerate(placement):
        found += _on_rank(rank, program[rank], set(stages), owner)
        of_stage: dict[int, list[Action]] = defaultdict(list)
        for action in program[rank]:
            of_stage[action.stage].append(action)
        for stage in stages:
            found += _of_stage(stage, of_stage[stage], microbatches, trains)
    return found or _waits(program, sum(map(len, placement)))


def _on_rank(rank: int, actions: Sequence[Action], stages: set[int], owner: Mapping[int, int]) -> list[str]:
    found = []
    for action in actions:
        if action.stage not in owner:
            found.append(f"rank {rank} has {action}, but there is no stage {action.stage}")
        elif action.stage not in stages:
            found.append(f"rank {rank} has {action}, but stage {action.stage} is on rank {owner[action.stage]}")
    return found


def _of_stage(stage: int, actions: Sequence[Action], microbatches: int, trains: bool) -> list[str]:
    found = []
    position: dict[tuple[str, int], int] = {}
    for index, action in enumerate(actions):
        if not 0 <= action.microbatch < microbatches:
            found.append(f"{action}: there are only microbatches 0 to {microbatches - 1}")
        elif (action.kind, action.microbatch) in position:
            found.append(f"{action} appears twice")
        else:
            position[action.kind, action.microbatch] = index
    for microbatch in range(microbatches):
        at = {kind: position[kind, microbatch] for kind in "FBIW" if (kind, microbatch) in position}
        found += _of_microbatch(stage, microbatch, at, trains)
    for kind, noun in (("F", "forward"), ("B", "backward"), ("I", "backward"), ("W", "weight gradient")):
        order = [action.microbatch for action in actions if action.kind == kind]
        late = next((b for a, b in pairwise(order) if b < a), None)
        if late is not None:
            found.append(f"stage {stage}: the {noun} of microbatch {late} comes after that of a later microbatch")
    return found


def _of_microbatch(stage: int, microbatch: int, at: dict[str, int], trains: bool) -> list[str]:
    name = f"stage {stage}, microbatch {microbatch}"
    found = [] if "F" in at else [f"{name}: there is no forward"]
    backward = sorted(set(at) - {"F"})
    if not trains:
        return [*found, *(f"{name}: {kind} in a forward-only program" for kind in backward)]
    if not backward:
        return [*found, f"{name}: there is no backward"]
    if backward not in (["B"], ["I", "W"]):
        return [*found, f"{name}: the backward is {' and '.join(backward)}; it must be B, or I and W"]
    first = backward[0]
    if "F" in at and at[first] < at["F"]:
        found.append(f"{name}: {first} comes before the forward")
    if "I" in at and at["W"] < at["I"]:
        found.append(f"{name}: W comes before I")
    return found


def _waits(program: Program, num_stages: int) -> list[str]:
    """Describes which ranks hang, and what they wait for."""
    done: set[Action] = set()
    position = dict.fromkeys(program, 0)
    waiting: dict[tuple[int, int], list[int]] = defaultdict(list)  # by stage and microbatch of what is missing
    awake = deque(program)
    while awake:
        rank = awake.popleft()
        actions = program[rank]
        while position[rank] < len(actions):
            action = actions[position[rank]]
            if missing_input(action, done, num_stages):
                waiting[action.stage + (-1 if action.kind == "F" else 1), action.microbatch].append(rank)
                break
            done.add(action)
            position[rank] += 1
            awake.extend(waiting.pop((action.stage, action.microbatch), ()))
    return [
        f"rank {rank} hangs at {actions[position[rank]]}: it needs "
        f"{missing_input(actions[position[rank]], done, num_stages)} first"
        for rank, actions in program.items()
        if position[rank] < len(actions)
    ]


def missing_input(action: Action, done: set[Action], num_stages: int) -> str:
    """Returns the action that an action waits for, as text; empty if it can run.

    It looks only at inputs from other stages: a rank runs its own actions in order.
    """
    stage, microbatch = action.stage, action.microbatch
    if action.kind == "F" and stage > 0:
        needed = Action(stage - 1, "F", microbatch)
        return "" if needed in done else str(needed)
    if action.kind in "BI" and stage < num_stages - 1:
        backward, split = Action(stage + 1, "B", microbatch), Action(stage + 1, "I", microbatch)
        return "" if backward in done or split in done else str(backward)
    return ""
