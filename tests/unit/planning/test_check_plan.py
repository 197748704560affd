"""Problems of mesh, cut and schedule."""

from __future__ import annotations

from typing import Any

import pytest
from planned_jobs import job_with

from raypp.planning.check import check_plan

MOE = {"kind": "qwen3_moe", "num_experts": 8}


def problem(**sections: Any) -> tuple[str, str, str]:
    found = check_plan(job_with(**sections))
    assert len(found) == 1, found
    return found[0].key, found[0].fault, found[0].fix


def test_a_good_job_has_no_problem() -> None:
    assert check_plan(job_with()) == []
    assert check_plan(job_with(model=MOE, mesh={"fsdp": 4, "ep": 2})) == []


def test_too_few_microbatches_for_1f1b() -> None:
    key, what, fix = problem(pipeline={"microbatches": 3}, mesh={"pp": 4})
    assert key == "pipeline.microbatches"
    assert "3 are too few for 1f1b on 4 pipeline ranks" in what
    assert "at least 4" in fix and "mesh.pp 3" in fix and "gpipe" in fix


def test_too_few_microbatches_for_virtual_stages_are_advised_a_schedule_that_has_them() -> None:
    pipeline = {"microbatches": 3, "stages_per_rank": 2, "schedule": "dualpipev"}
    (problem,) = check_plan(job_with(pipeline=pipeline, mesh={"pp": 2}))
    assert problem.key == "pipeline.microbatches" and problem.fix.endswith("pipeline.schedule looped_bfs")
    assert check_plan(job_with(pipeline={**pipeline, "schedule": "looped_bfs"}, mesh={"pp": 2})) == []


def test_weights_that_leave_a_stage_without_a_layer() -> None:
    ones = {"input_weight": 1, "output_weight": 1}
    key, _, fix = problem(mesh={"pp": 8}, pipeline=ones)
    assert key == "mesh.pp"
    assert "mesh.pp ≤ 5" in fix and "lower pipeline.input_weight/output_weight (now 1/1)" in fix


@pytest.mark.parametrize("weights", [{"input_weight": 0, "output_weight": 4}, {}])
def test_the_fix_for_a_v_counts_layers_whatever_the_ends_weigh(weights: dict[str, float]) -> None:
    pipeline = {"schedule": "zbv", "stages_per_rank": 2, **weights}
    assert problem(model={"num_layers": 6}, mesh={"pp": 4}, pipeline=pipeline) == (
        "mesh.pp",
        "8 stages for 6 layers leave stage 6 without a layer",
        "use mesh.pp ≤ 3 with 2 stages per rank",
    )
    assert check_plan(job_with(model={"num_layers": 6}, mesh={"pp": 3}, pipeline=pipeline)) == []


def test_the_fix_counts_stages_per_rank() -> None:
    pipeline = {"schedule": "interleaved_1f1b", "stages_per_rank": 3}
    key, _, fix = problem(mesh={"pp": 4}, pipeline=pipeline)
    assert (key, fix) == ("mesh.pp", "use mesh.pp ≤ 2 with 3 stages per rank")
    _, _, fix = problem(mesh={"pp": 1}, pipeline={"schedule": "looped_bfs", "stages_per_rank": 9})
    assert fix == "use pipeline.stages_per_rank ≤ 8"


@pytest.mark.parametrize(
    ("cut", "what"),
    [
        ([8], "1 number for 2 stages"),
        ([3, 3, 2], "3 numbers for 2 stages"),
        ([4, 5], "4 + 5 = 9 layers, 1 more than model.num_layers (8)"),
        ([3, 3], "3 + 3 = 6 layers, 2 fewer than model.num_layers (8)"),
        ([8, 0], "stage 1 has no layers"),
    ],
)
def test_a_cut_that_does_not_fit(cut: list[int], what: str) -> None:
    key, found, fix = problem(pipeline={"layers_per_stage": cut})
    assert key == "pipeline.layers_per_stage"
    assert what in found
    assert "[4, 4]" in fix


def test_a_cut_between_layers_that_share_keys() -> None:
    shared = {"kind": "gemma4", "num_layers": 12, "num_kv_shared_layers": 4}
    key, fault, fix = problem(model=shared, pipeline={"layers_per_stage": [6, 6]})
    assert key == "pipeline.layers_per_stage" and "before layer 6 parts layers 5 to 11" in fault
    assert "7 or more layers on the last stage" in fix
    assert check_plan(job_with(model=shared, pipeline={"layers_per_stage": [5, 7]})) == []
    _, fault, fix = problem(model={**shared, "per_layer_width": 8})
    assert "parts layers 0 to 11" in fault and fix == "use mesh.pp 1 and pipeline.stages_per_rank 1"


def test_experts_that_do_not_divide() -> None:
    assert problem(model=MOE, mesh={"fsdp": 4, "ep": 3})[0] == "mesh.ep"
    assert "use 2 or 4" in problem(model=MOE, mesh={"fsdp": 4, "ep": 3})[2]
    assert "does not divide model.num_experts" in problem(model={**MOE, "num_experts": 6}, mesh={"fsdp": 4, "ep": 4})[1]
    assert "no experts" in problem(mesh={"fsdp": 2, "ep": 2})[1]


def test_experts_that_what_is_left_of_the_mesh_cannot_cut() -> None:
    odd = {**MOE, "hidden_size": 36, "num_heads": 4, "expert_ffn_size": 35}
    key, what, fix = problem(model=odd, mesh={"fsdp": 16, "ep": 2})
    assert key == "mesh.ep"
    assert "leaves 8 ranks" in what and "expert_ffn_size 35" in what
    assert fix.startswith("use 1 or 4,") and "multiple of 8" in fix
    assert check_plan(job_with(model=odd, mesh={"fsdp": 16, "ep": 4})) == []


def test_biases_of_experts_have_one_width_that_must_be_cut() -> None:
    """Either width of a matrix may be cut. A bias has one: 2 · expert_ffn_size, or hidden_size."""
    biased = {"kind": "gpt_oss", "num_experts": 8, "hidden_size": 36, "num_heads": 4, "head_dim": 8}
    mesh = {"fsdp": 16, "ep": 2}
    key, what, fix = problem(model={**biased, "expert_ffn_size": 64}, mesh=mesh)
    assert key == "mesh.ep" and fix.startswith("use 1 or 4,")
    assert "fused_down_proj_bias cannot be cut into 8" in what and "model.hidden_size 36" in what
    _, what, _ = problem(model={**biased, "hidden_size": 64, "expert_ffn_size": 34}, mesh=mesh)
    assert "fused_gate_up_proj_bias" in what and "model.expert_ffn_size 34" in what
    assert check_plan(job_with(model={**biased, "hidden_size": 64, "expert_ffn_size": 36}, mesh=mesh)) == []
    train = {"optimizer": {"state": "8bit"}}
    key, what, _ = problem(model={**biased, "hidden_size": 64, "expert_ffn_size": 64}, mesh=mesh, train=train)
    assert key == "train.optimizer.state" and "_bias" in what


def test_more_experts_per_token_than_there_are() -> None:
    key, _, fix = problem(model={**MOE, "experts_per_token": 9})
    assert (key, fix) == ("model.experts_per_token", "use at most 8")


def test_parts_of_rows_that_are_shorter_than_a_convolution_reaches() -> None:
    model = {"kind": "qwen3_5"}
    key, what, fix = problem(mesh={"cp": 2}, pipeline={"pad_to_multiple_of": 4}, model=model)
    assert key == "pipeline.pad_to_multiple_of" and "of 2 tokens" in what and "reads 3" in what and "6" in fix
    assert check_plan(job_with(mesh={"cp": 2}, pipeline={"pad_to_multiple_of": 6}, model=model)) == []
    ulysses = {"cp": 2, "cp_style": "ulysses"}
    assert check_plan(job_with(mesh=ulysses, pipeline={"pad_to_multiple_of": 4}, model=model)) == []


def test_heads_that_ulysses_cannot_share_out() -> None:
    key, _, fix = problem(mesh={"cp": 3, "cp_style": "ulysses"})
    assert key == "mesh.cp" and "use 2 or 4" in fix and "ring" in fix
    assert check_plan(job_with(mesh={"cp": 3, "cp_style": "ring"})) == []
    few = {"num_heads": 4, "num_kv_heads": 1}
    assert check_plan(job_with(model=few, mesh={"cp": 4, "cp_style": "ulysses"})) == []  # each rank gets a copy


def test_a_ring_needs_two_chunks_per_rank() -> None:
    key, what, fix = problem(mesh={"cp": 2}, pipeline={"pad_to_multiple_of": 7})
    assert key == "pipeline.pad_to_multiple_of"
    assert "7 is odd" in what and "use 8" in fix and "ulysses" in fix
    assert check_plan(job_with(mesh={"cp": 2, "cp_style": "ulysses"}, pipeline={"pad_to_multiple_of": 7})) == []


def test_stages_per_rank_against_the_schedule() -> None:
    key, what, fix = problem(pipeline={"stages_per_rank": 2})
    assert key == "pipeline.stages_per_rank"
    assert "1f1b takes 1 per rank, not 2" in what
    assert "interleaved_1f1b" in fix and "zbv" in fix
    assert problem(pipeline={"schedule": "zbv"})[0] == "pipeline.stages_per_rank"


def test_8_bit_moments_need_whole_blocks_of_experts_rows() -> None:
    # Three ranks share an expert. They cut 688 rows of 3 · 86 columns by columns: 86 is no block.
    narrow = {**MOE, "hidden_size": 258, "num_heads": 3, "num_kv_heads": 3, "expert_ffn_size": 688}
    mesh, train = {"fsdp": 6, "ep": 2}, {"optimizer": {"state": "8bit"}}
    key, what, fix = problem(model=narrow, mesh=mesh, train=train)
    assert key == "train.optimizer.state"
    assert "model.expert_ffn_size 688" in what and "258 columns" in what and "mesh.ep 6" in fix
    assert check_plan(job_with(model=narrow, mesh=mesh)) == []
    assert check_plan(job_with(model={**narrow, "expert_ffn_size": 690}, mesh=mesh, train=train)) == []
    wide = {**narrow, "hidden_size": 768}
    assert check_plan(job_with(model=wide, mesh=mesh, train=train)) == []


def test_all_problems_are_reported_at_once() -> None:
    job = job_with(mesh={"pp": 9, "ep": 2}, pipeline={"microbatches": 2})
    assert [p.key for p in check_plan(job)] == ["pipeline.microbatches", "mesh.pp", "mesh.ep"]
