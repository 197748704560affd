"""Checks that a program computes everything exactly once, in an order that can run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise

from raypp.planning.schedules.action import Action, Program
from raypp.planning.schedules.simulate import DeadlockError, Simulator

_LISTED = 16


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
