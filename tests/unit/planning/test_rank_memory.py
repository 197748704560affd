"""Tests the memory of a rank at its peak."""

from typing import Any

import pytest
from planned_jobs import job_with

from raypp.job.job import Job
from raypp.planning.activations import stage_activation_bytes
from raypp.planning.host_memory import HostMemory, host_memory
from raypp.planning.machines import Machines, Node
from raypp.planning.memory import rank_memory
from raypp.planning.plan import make_plan
from raypp.planning.resolve import resolve_pipeline

GIB = 1024**3
LARGE = {"hidden_size": 2048, "num_heads": 16, "num_kv_heads": 4, "ffn_size": 5632, "num_layers": 8}


def test_the_parts_are_those_of_one_moment() -> None:
    """At the end of gpipe's warm-up nothing has been accumulated yet; 1f1b has both at once."""
    cut = {"layers_per_stage": [4, 4], "microbatches": 16}
    gpipe, usual = (
        make_plan(job_with(pipeline={"schedule": name, **cut}, train={"micro_batch_size": 8})).memory[1]
        for name in ("gpipe", "1f1b")
    )
    assert gpipe.activations == 16 * usual.activations and gpipe.logits > usual.logits
    assert gpipe.gradients == 0 and usual.gradients == usual.weights


def test_receives_ahead_and_runtime_are_counted() -> None:
    one, two = (make_plan(job_with(mesh={"pp": pp}, resources={"device": "cpu"})).memory[0] for pp in (1, 2))
    message = 2 * 256 * 256 * 4
    # The activations that rank 0 sends are counted as its outputs.
    assert one.messages == 0 and two.messages == 3 * message
    on_card = make_plan(job_with(resources={"device": "cuda"})).memory[0]
    assert on_card.runtime > two.runtime > 0


def test_sends_that_wait_are_counted_at_the_peak() -> None:
    def messages(**sections: Any) -> list[int]:
        sections = {"resources": {"device": "cpu"}, "train": {"micro_batch_size": 8}, **sections}
        plan = make_plan(job_with(**sections))
        return [memory.messages for memory in plan.memory]

    size = 8 * 256 * 256
    steady = {"microbatches": 16}
    assert messages(pipeline=steady) == [3 * 4 * size, (3 + 1) * 4 * size]
    # A deeper warm-up delays the proofs that gradients have arrived.
    assert messages(pipeline={**steady, "lookahead": 2}) == [3 * 4 * size, (3 + 3) * 4 * size]
    # Activations in int8 are copies, with a scale per token.
    wire, small = {"wire": {"compression": "int8"}, **steady}, size + 8 * 256 * 4
    assert messages(pipeline=wire) == [(3 + 2) * small, (3 + 1) * small]
    # Nothing proves that activations of a frozen stage have arrived, and no gradient reaches it.
    lora = {"rank": 2, "base": "fp32", "targets": ["layers.7.self_attn.q_proj"]}
    assert messages(pipeline=steady, model={"lora": lora}) == [15 * 4 * size, 3 * 4 * size]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved_1f1b", "zbv", "dualpipev"])
@pytest.mark.parametrize("upper", [False, True], ids=["all", "upper layers only"])
def test_a_program_without_its_repeats_has_the_same_peak(schedule: str, upper: bool) -> None:
    lora = {"rank": 2, "base": "fp32", "targets": ["layers.7.self_attn.q_proj"]}
    pipeline = {"schedule": schedule, "microbatches": 32, "lookahead": 1, "wire": {"compression": "int8"}}
    if schedule not in ("gpipe", "1f1b"):
        pipeline["stages_per_rank"] = 2
    job = job_with(pipeline=pipeline, mesh={"pp": 4}, model={"lora": lora} if upper else {})
    resolved = resolve_pipeline(job)
    simulator = resolved.simulator()
    for rank, stages in enumerate(resolved.stages_of_rank):
        whole, few = resolved.program[rank], simulator.situations[rank]
        assert len(few) < len(whole) or schedule == "gpipe" or upper
        all_of_it, part = (
            rank_memory(job, stages, resolved.cut, actions, simulator.waiting[rank]) for actions in (whole, few)
        )
        assert all_of_it == part


def test_a_split_backward_keeps_activations_and_gradients_between_its_halves() -> None:
    sections = {"schedule": "zbv", "stages_per_rank": 2}
    split = make_plan(job_with(pipeline=sections, train={"micro_batch_size": 8})).memory[0]
    flying = make_plan(job_with(pipeline=sections)).in_flight
    rows = 8 * 256 * stage_activation_bytes(job_with(pipeline=sections), 0, [2, 2, 2, 2])
    assert split.activations > max(flying) * rows


def of(job: Job, memory: int) -> HostMemory:
    plan = make_plan(job)
    machines = Machines((Node("a", 1, memory=memory), Node("b", 1, memory=memory)))
    return host_memory(job, resolve_pipeline(job), plan.memory, machines, "cuda")


def test_several_nodes_keep_six_snapshots_a_rank_or_five_when_memory_is_short() -> None:
    job = job_with(checkpoint={"url": "/tmp/somewhere"})
    unknown = of(job, 0)
    assert (unknown.files, unknown.fewest_files, unknown.snapshots) == (6, 5, 6 * unknown.state)
    assert unknown.state == 12 * max(rank.weights for rank in make_plan(job).memory) // 4
    assert unknown.problem() == ""

    def with_room_for(files: float) -> str:
        return of(job, int(files * unknown.state * 1.25) + 100).problem()

    assert with_room_for(6) == ""
    assert "wait for the link" in with_room_for(5.5)
    assert "copies on another node" in with_room_for(4)
    assert "too little for snapshots" in with_room_for(2)
    assert "too little memory for its ranks and a save" in with_room_for(0.5)
    assert unknown.saving == 0, "a save uploads a snapshot"
    alone = host_memory(job, resolve_pipeline(job), make_plan(job).memory, Machines.alike(2, 2, None), "cuda")
    assert (alone.files, alone.snapshots) == (3, 2 * 3 * alone.state)


PURE, IN_8_BITS = {"precision": "bf16_pure"}, {"optimizer": {"state": "8bit"}}


@pytest.mark.parametrize(
    ("train", "weight", "gradient", "state"),
    [
        ({}, 4, 4, 8),
        ({"precision": "bf16"}, 4 + 2, 4, 8),
        (PURE, 2, 4, 8),
        (PURE | {"reduce_dtype": "bf16"}, 2, 2, 8),
        (IN_8_BITS, 4, 4, 2),
        (PURE | IN_8_BITS, 2, 4, 2),
        (PURE | {"optimizer": {"kind": "muon"}}, 2, 4, 4),
    ],
    ids=str,
)
def test_bytes_per_parameter_follow_precision_and_state(
    train: dict[str, object], weight: int, gradient: int, state: int
) -> None:
    job = job_with(train=train, model=LARGE, resources={"device": "cuda"})
    found, plain = make_plan(job).memory[1], make_plan(job_with(model=LARGE)).memory[1]
    parameters = plain.weights // 4
    assert found.weights == weight * parameters
    assert found.gradients == gradient * parameters
    assert found.optimizer == pytest.approx(state * parameters, rel=0.02 if state == 2 else 1e-9)


def test_an_8b_model_trains_in_full_on_four_cards_of_24_gib() -> None:
    llama = {
        "kind": "llama", "num_layers": 32, "hidden_size": 4096, "num_heads": 32, "num_kv_heads": 8, "ffn_size": 14336,
        "vocab_size": 128256,
    }  # fmt: skip
    shared = {
        "model": llama, "mesh": {"pp": 4}, "data": {"seq_len": 4096}, "resources": {"device": "cuda"},
        "pipeline": {"microbatches": 16},
    }  # fmt: skip
    train = {"micro_batch_size": 1, "activation_checkpointing": "full"}

    def largest(train: dict[str, object]) -> int:
        return max(memory.total for memory in make_plan(job_with(**shared, train=train)).memory)

    assert largest({**train, **PURE, **IN_8_BITS}) < 24 * GIB
    assert largest({**train, "precision": "bf16"}) > 24 * GIB
