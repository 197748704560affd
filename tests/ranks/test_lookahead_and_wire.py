"""The warm-up's depth changes no bit; compressed messages give reproducible numbers."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from collecting_reporter import CollectingReporter
from comparison import assert_identical
from harness import run_in_turn, run_ranks
from safetensors.torch import load_file
from test_recut_of_runs import live
from training import document, merged, thinned, train_steps

from raypp.planning.schedules.catalogue import SCHEDULES, schedule_named
from raypp.rank.step.step import StepRunner


def steps_of(
    rank: int, world: int, port: int, job: dict[str, Any], steps: int, depths: dict[int, int] | None = None
) -> dict[str, Any]:
    """Trains some steps; returns the reports and events. From each step in `depths` on, the program
    has another depth, as with `lookahead: auto`."""
    reported = CollectingReporter()

    def switch(step: int, runner: StepRunner) -> None:
        if depths and step in depths:
            runner.built.runtime.load(runner.pipeline.program_with(depths[step]))

    found = train_steps(rank, world, port, job, steps, before=switch, tell=reported.event)
    return {**found, "reported": [(event.kind, event.message) for event in reported.events]}


@pytest.mark.parametrize("pp", thinned([2, 3], [2]))
def test_lookahead_auto_measures_chooses_once_and_changes_no_bit(pp: int) -> None:
    jobs = [(document(pp=pp, pipeline={"lookahead": lookahead}), 5) for lookahead in ("auto", 0)]
    auto, fixed = run_in_turn(pp, steps_of, jobs)
    assert_identical(merged(auto), merged(fixed))
    ((kind, words),) = auto[0]["reported"]
    assert kind == "lookahead" and "per message against" in words
    assert all(rank["reported"] == auto[0]["reported"] for rank in auto)
    assert fixed[0]["reported"] == []


@pytest.mark.parametrize(
    ("schedule", "stages_per_rank"),
    [
        ("1f1b", 1),
        pytest.param("interleaved_1f1b", 2, marks=pytest.mark.slow),
        pytest.param("interleaved_zero_bubble", 2, marks=pytest.mark.slow),
        pytest.param("zbv", 2, marks=pytest.mark.slow),
        pytest.param("dualpipev", 2, marks=pytest.mark.slow),
    ],
)
def test_programs_of_other_depths_between_steps_change_no_bit(schedule: str, stages_per_rank: int) -> None:
    job = document(pp=2, schedule=schedule, pipeline={"stages_per_rank": stages_per_rank, "lookahead": 0})
    switched, plain = run_in_turn(2, steps_of, [(job, 4, {2: 2, 3: 4, 4: 1}), (job, 4)])
    assert_identical(merged(switched), merged(plain))


def wired(wire: dict[str, Any], **other: Any) -> dict[str, Any]:
    return document(pp=2, pipeline={"wire": wire}, **other)


def test_compressed_messages_give_the_same_bits_again_and_nearly_the_exact_loss() -> None:
    wires = (
        ({"dtype": "bf16"}, 0.5, 1e-3),
        ({"compression": "int8"}, 36 / 128, 1e-3),
        ({"compression": {"activations": "int8", "gradients": "bf16"}}, (36 / 128 + 0.5) / 2, 1e-3),
    )
    jobs = [(document(pp=2), 3), *((wired(wire), 3) for wire, _, _ in wires)]
    (exact, *first), (_, *again) = (map(merged, run_in_turn(2, steps_of, jobs)) for _ in range(2))
    for (_, share, near), found, same in zip(wires, first, again, strict=True):
        assert_identical(same, found)
        assert found["loss"] == pytest.approx(exact["loss"], rel=near) and found["loss"] != exact["loss"]
        assert found["wire_bytes"] == [round(share * count) for count in exact["wire_bytes"]]


@pytest.mark.gate
def test_a_run_with_int8_that_was_restarted_ends_with_the_same_bytes(tmp_path: Path) -> None:
    def job(folder: str, steps: int) -> dict[str, Any]:
        made = wired({"compression": "int8"}, checkpoint={"url": str(tmp_path / folder), "every_steps": 2})
        made["train"] |= {"steps": steps, "lr_schedule": {"kind": "constant", "warmup_steps": 1}}
        return made

    run_ranks(2, live, job("whole", 4), 1)
    run_ranks(2, live, job("twice", 2), 1)
    assert [rank["committed"] for rank in run_ranks(2, live, job("twice", 4), 2)] == [4, 4]
    whole, twice = tensors_of(tmp_path / "whole"), tensors_of(tmp_path / "twice")
    assert whole.keys() == twice.keys() and whole
    assert all(torch.equal(value, twice[name]) for name, value in whole.items())


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in sorted((folder / "numbers" / "step-00000004").glob("attempt-*/rank-*.safetensors")):
        found |= load_file(path)
    return found


def stages_tried(schedule: str) -> list[int]:
    """Returns numbers of stages per rank: the minimum, and 2 and 4 if they are supported."""
    kind = schedule_named(schedule)
    return [stages for stages in sorted({kind.stages_per_rank[0], 2, 4}) if kind.allows_stages(stages)]


CASES = [
    (schedule, pp, stages_per_rank, microbatches, lookahead, wire)
    for schedule in SCHEDULES.names()
    for pp in (2, 4)
    for stages_per_rank in stages_tried(schedule)
    for microbatches, lookahead, wire in ((8, random.Random(f"{schedule}{pp}").randrange(5), "none"), (11, 4, "int8"))
    if pp * stages_per_rank <= 8
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "pp", "stages_per_rank", "microbatches", "lookahead", "wire"), CASES)
def test_no_order_of_messages_hangs_on_real_ranks_with_random_lengths(
    schedule: str, pp: int, stages_per_rank: int, microbatches: int, lookahead: int, wire: str
) -> None:
    pipeline = {"stages_per_rank": stages_per_rank, "lookahead": lookahead, "wire": {"compression": wire}}
    job = document(
        pp=pp, layers=8, schedule=schedule, microbatches=microbatches, model={"hidden_size": 64}, pipeline=pipeline
    )
    job["data"] |= {"document_len": [2, 500], "seq_len": 512, "packing": False}
    assert len(merged(run_ranks(pp, train_steps, job, 3))["loss"]) == 3
