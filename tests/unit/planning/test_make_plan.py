"""Plans: ranks, memory, links, times."""

import pytest
from planned_jobs import job_with

from raypp.planning.flops import flops_per_token
from raypp.planning.plan import Grounds, Plan, make_plan
from raypp.planning.schedules.catalogue import SCHEDULES, schedule_named
from raypp.planning.sizes import sizes_of


def test_a_plan_names_every_rank_its_stages_and_layers() -> None:
    plan = make_plan(job_with(mesh={"fsdp": 2}))
    assert plan.world == 4
    assert plan.axes == {"pp": 2, "dp_replicate": 1, "fsdp": 2, "cp": 1, "tp": 1, "ep": 1}
    assert [rank.label for rank in plan.ranks] == ["pp0-fsdp0", "pp0-fsdp1", "pp1-fsdp0", "pp1-fsdp1"]
    assert plan.cut == (5, 3)
    assert [(rank.stages, rank.layers) for rank in plan.ranks[::2]] == [((0,), ((0, 4),)), ((1,), ((5, 7),))]
    assert plan.program[0].startswith("0F0 0F1 0B0")
    assert plan.picture.startswith("pp0  0  1  ·  ·  0━━━━ 2")


@pytest.mark.parametrize("name", SCHEDULES.names())
def test_every_schedule_can_be_planned(name: str) -> None:
    stages_per_rank = schedule_named(name).nearest_stages(2)
    plan = make_plan(job_with(pipeline={"schedule": name, "stages_per_rank": stages_per_rank}))
    crossing = [b for b in plan.boundaries if b.crosses_ranks]
    assert len(plan.boundaries) == 2 * stages_per_rank - 1
    # In a V, the last rank sends to itself.
    assert len(crossing) == len(plan.boundaries) - (schedule_named(name).placement == "v")
    assert 0 < plan.simulated_bubble < 0.5


@pytest.mark.parametrize("name", SCHEDULES.names())
def test_a_plan_with_compiled_blocks_has_whole_backwards_in_fp8_only_and_says_so(name: str) -> None:
    pipeline = {"schedule": name, "stages_per_rank": schedule_named(name).nearest_stages(2)}
    plain, compiled = (
        make_plan(job_with(pipeline=pipeline, train={"compile": whether, "precision": "fp8"}))
        for whether in (False, True)
    )
    split = make_plan(job_with(pipeline=pipeline, train={"compile": True}, mesh={"pp": 2, "tp": 2}))
    assert split.program == make_plan(job_with(pipeline=pipeline)).program
    assert not any("backward" in remark for remark in split.remarks)
    splits = schedule_named(name).splits_backward
    assert any("W" in line for line in plain.program) == splits
    assert not any("W" in line or "I" in line for line in compiled.program)
    said = [remark for remark in compiled.remarks if "splits backwards" in remark]
    assert len(said) == splits and all(name in remark for remark in said)
    assert plain.remarks[0].startswith("blocks are not compiled (")
    assert (compiled.program == plain.program) != splits


def test_a_plan_of_auto_is_that_of_what_it_means_on_each_device() -> None:
    wide = {"model": {"vocab_size": 4096}, "train": {"optimizer": {"kind": "sgd"}}}
    auto, fp32, bf16 = (
        job_with(**wide | {"train": wide["train"] | {"precision": name}}) for name in ("auto", "fp32", "bf16")
    )
    for device, meant in (("cpu", fp32), ("h100", bf16)):
        grounds = Grounds(device=device)
        assert make_plan(auto, grounds=grounds).as_dict() == make_plan(meant, grounds=grounds).as_dict()
    both = make_plan(auto).predictions
    assert both == (make_plan(fp32).predictions[0], make_plan(bf16).predictions[1])
    assert make_plan(auto).memory == make_plan(bf16).memory != make_plan(fp32).memory


def test_flops_are_six_per_weight_and_the_attention() -> None:
    job = job_with()
    matrices = sizes_of(job.model).whole - 4096 * 256 - (2 * 8 + 1) * 256
    attention = 3 * 8 * 2 * 256 * 256
    assert flops_per_token(job) == 6 * matrices + attention


def test_link_bytes_are_rows_times_tokens_times_width() -> None:
    plan = make_plan(job_with(train={"micro_batch_size": 2}), Grounds(link_gbps=1.0))
    (boundary,) = plan.boundaries
    assert boundary.bytes_per_microbatch == 2 * 256 * 256 * 4
    assert boundary.bytes_per_step == 2 * 8 * boundary.bytes_per_microbatch
    assert plan.link_bytes_per_step == 8 * boundary.bytes_per_microbatch
    assert plan.link_s_per_microbatch == pytest.approx(boundary.bytes_per_microbatch * 8e-9)
    assert make_plan(job_with()).link_s_per_microbatch is None


@pytest.mark.parametrize(
    "sections", [{"train": {"precision": "bf16"}}, {"mesh": {"cp": 2}}, {"pipeline": {"wire": {"dtype": "bf16"}}}]
)
def test_half_precision_and_context_parallel_halve_the_messages(sections: dict[str, object]) -> None:
    whole, part = make_plan(job_with()), make_plan(job_with(**sections))
    assert part.boundaries[0].bytes_per_microbatch * 2 == whole.boundaries[0].bytes_per_microbatch


def memory_of(**sections: object) -> Plan:
    return make_plan(job_with(**sections))


def test_fsdp_divides_weights_and_states_and_gathers_the_rest() -> None:
    plain, sharded = memory_of().memory[0], memory_of(mesh={"fsdp": 2}).memory[0]
    assert (sharded.weights, sharded.optimizer) == (plain.weights // 2, plain.optimizer // 2)
    assert sharded.gathered == 2 * plain.weights
    resharded = memory_of(mesh={"fsdp": 2, "reshard_after_forward": True}).memory[0]
    assert resharded.gathered < sharded.gathered


def test_a_split_backward_frees_each_layers_weights_like_a_whole_one() -> None:
    def gathered(freed: bool) -> int:
        mesh = {"fsdp": 2, "reshard_after_forward": freed}
        return memory_of(mesh=mesh, pipeline={"schedule": "interleaved_zero_bubble"}).memory[0].gathered

    assert gathered(True) < gathered(False)


def test_activations_count_the_microbatches_in_flight() -> None:
    one = memory_of(pipeline={"schedule": "1f1b", "layers_per_stage": [4, 4]})
    all_of_them = memory_of(pipeline={"schedule": "gpipe", "layers_per_stage": [4, 4]})
    assert one.in_flight == (2, 1) and all_of_them.in_flight == (8, 8)
    assert all_of_them.memory[0].activations == 4 * one.memory[0].activations


def test_checkpointing_and_bf16_save_activations() -> None:
    plain = memory_of().memory[0].activations
    assert memory_of(train={"activation_checkpointing": "full"}).memory[0].activations < plain / 3
    assert memory_of(train={"precision": "bf16"}).memory[0].activations == plain // 2


def test_only_the_last_stage_has_logits() -> None:
    assert [rank.logits > 0 for rank in memory_of().memory] == [False, True]


def test_a_loss_in_chunks_needs_a_chunk_and_one_gradient_of_the_projection() -> None:
    sizes = {"model": {"vocab_size": 152_000, "hidden_size": 1024}, "data": {"seq_len": 2048}}
    cpu, cuda = (memory_of(resources={"device": kind}, **sizes).memory[1].logits for kind in ("cpu", "cuda"))
    rows, projection = 4096 * 1024 * 4, 152_000 * 1024 * 4
    assert cpu == 2 * 4 * 205 * 152_000 + projection + rows  # 20 chunks of 205 tokens
    assert cuda == 2 * 4 * 1366 * 152_000 + projection + rows  # 3 of 1366
    small = memory_of(resources={"device": "cpu"}, data={"seq_len": 2048}).memory[1].logits
    one = memory_of(resources={"device": "cuda"}, model={"hidden_size": 1024}, data={"seq_len": 2048}).memory[1].logits
    assert one == 2 * 4 * 4096 * 4096 + 4096 * 1024 * 4 + rows  # one chunk, through the same kernel
    assert small == 4096 * 4096 * 4 * 4  # 64 MiB of logits, not cut; the log-softmax and two gradients
