"""`train.activation_checkpointing: offload` changes no bit under any schedule."""

from typing import Any

import pytest
from comparison import assert_identical
from harness import run_ranks
from late_copies import LateCopies
from training import document, seat_of, thinned, train_steps, trained

from raypp.job.load import parse_job
from raypp.planning.decide import decide
from raypp.planning.offload import ON_DEVICE
from raypp.planning.resolve import resolve_pipeline
from raypp.planning.schedules.action import splits_backward
from raypp.planning.schedules.catalogue import SCHEDULES, schedule_named
from raypp.rank.assemble import assemble
from raypp.rank.optimizers import optimizer_offload
from raypp.rank.step.step import StepRunner, Stopwatch
from raypp.records import Requests
from raypp.stages.pipeline import activation_offload

STEPS = 2


def train_late(*arguments: Any) -> dict[str, Any]:
    """Trains with copies that are as late as they may be."""
    activation_offload.CopyStreams = optimizer_offload.CopyStreams = LateCopies  # type: ignore[misc]
    return train_steps(*arguments)


def extent(value: str, **settings: Any) -> dict[str, Any]:
    train = {"activation_checkpointing": value, **settings.pop("train", {})}
    return trained(document(train=train, **settings), STEPS, train=train_late)


def pipelined(schedule: str) -> dict[str, Any]:
    return {"pp": 2, "schedule": schedule, "pipeline": {"stages_per_rank": schedule_named(schedule).nearest_stages(2)}}


def test_one_process_computes_the_same_bits() -> None:
    assert_identical(extent("offload"), extent("none"))


def test_with_an_optimizer_that_is_offloaded_too_a_pipeline_computes_the_same_bits() -> None:
    both = {"optimizer": {"kind": "adamw", "lr": 3e-3, "offload": True}}
    assert_identical(extent("offload", pp=2, train=both), extent("none", pp=2))


def moves(rank: int, world: int, port: int, source: dict[str, Any]) -> dict[str, Any]:
    """Trains a step and counts what is moved.

    Returns:
        `copies`: copies to host memory and back; `used`: tensors that autograd asked for, in
        backwards by kind of action; `late`: those whose way back began only then; `most`: most
        tensors on the device at a time; `left`: tensors that the step left behind.
    """
    parsed = parse_job(source)
    with assemble(decide(parsed), seat_of(rank, world, port, parsed), hang_timeout_s=60) as made:
        runner = StepRunner(made)
        offload: Any = made.built.runtime.offload
        found: dict[str, Any] = {"out": 0, "back": 0, "used": {}, "late": 0, "most": 0}
        leave, fetch, unpack = offload._leave, offload._fetch, offload._unpack

        def count() -> None:
            here = sum(one.device is not None for kept in offload._kept.values() for one in kept)
            found["most"] = max(found["most"], here)

        def leaving(one: Any) -> None:
            found["out"] += 1
            leave(one)

        def fetching(one: Any) -> None:
            found["back"] += one.device is None
            fetch(one)
            count()

        def unpacking(kept: Any) -> Any:
            if hasattr(kept, "host"):
                kind = made.built.runtime.now[1]
                found["used"][kind] = found["used"].get(kind, 0) + 1
                found["late"] += kept.device is None
            return unpack(kept)

        offload._leave, offload._fetch, offload._unpack = leaving, fetching, unpacking
        watch = Stopwatch()
        runner.run(1, runner.read(Requests(), watch), watch)
        found["left"] = len(offload._kept)
    return found


LATE = {"interleaved_zero_bubble": 2, "zbv": 2, "dualpipev": 2}
"""The second half of a backward goes through a stage's layers in an order that is known
only afterwards: one tensor per stage may come late."""


@pytest.mark.parametrize("schedule", thinned(SCHEDULES.names(), ["1f1b", "zbv"]))
def test_everything_comes_back_before_its_backward(schedule: str) -> None:
    source = document(train={"activation_checkpointing": "offload"}, **pipelined(schedule))
    program = resolve_pipeline(parse_job(source)).program
    for found in run_ranks(2, moves, source):
        assert found["out"] > 0 and found["left"] == 0
        assert found["most"] <= ON_DEVICE
        assert found["late"] <= LATE.get(schedule, 0)
        if splits_backward(program):
            assert found["back"] <= 2 * sum(found["used"].values())
        else:
            assert found["back"] == found["out"] <= sum(found["used"].values())
