"""Problems of mesh, cut and schedule."""

from typing import Any

import pytest
from planned_jobs import job_with

from raypp.planning.check import check_plan

MOE = {"kind": "qwen3_moe", "num_experts": 8}


VIRTUAL = {"microbatches": 3, "stages_per_rank": 2}
V = {"schedule": "zbv", "stages_per_rank": 2}
SIX_IN_EIGHT = "8 stages for 6 layers leave stage 6 without a layer | use mesh.pp ≤ 3 with 2 stages per rank"
SHARED = {"kind": "gemma4", "num_layers": 12, "num_kv_shared_layers": 4}
ODD = {**MOE, "hidden_size": 36, "num_heads": 4, "expert_ffn_size": 35}
# Either width of a matrix may be cut. A bias has one: 2 · expert_ffn_size, or hidden_size.
BIASED = {"kind": "gpt_oss", "num_experts": 8, "num_heads": 4, "head_dim": 8, "hidden_size": 64, "expert_ffn_size": 64}
# Three ranks share an expert. They cut 688 rows of 3 · 86 columns by columns: 86 is no block.
NARROW = {**MOE, "hidden_size": 258, "num_heads": 3, "num_kv_heads": 3, "expert_ffn_size": 688}
THREE, STATE = {"fsdp": 6, "ep": 2}, {"optimizer": {"state": "8bit"}}
EIGHT = {"fsdp": 16, "ep": 2}


@pytest.mark.parametrize(
    ("sections", "key", "words"),
    [
        ({"pipeline": {"microbatches": 3}, "mesh": {"pp": 4}}, "pipeline.microbatches",
         ["3 are too few for 1f1b on 4 pipeline ranks", "at least 4", "mesh.pp 3", "gpipe"]),
        ({"pipeline": {**VIRTUAL, "schedule": "dualpipev"}}, "pipeline.microbatches", ["pipeline.schedule looped_bfs"]),
        ({"mesh": {"pp": 8}, "pipeline": {"input_weight": 1, "output_weight": 1}}, "mesh.pp",
         ["mesh.pp ≤ 5", "lower pipeline.input_weight/output_weight (now 1/1)"]),
        ({"model": {"num_layers": 6}, "mesh": {"pp": 4}, "pipeline": V}, "mesh.pp", [SIX_IN_EIGHT]),
        ({"model": {"num_layers": 6}, "mesh": {"pp": 4}, "pipeline": {**V, "input_weight": 0, "output_weight": 4}},
         "mesh.pp", [SIX_IN_EIGHT]),
        ({"mesh": {"pp": 4}, "pipeline": {"schedule": "interleaved_1f1b", "stages_per_rank": 3}}, "mesh.pp",
         ["use mesh.pp ≤ 2 with 3 stages per rank"]),
        ({"mesh": {"pp": 1}, "pipeline": {"schedule": "looped_bfs", "stages_per_rank": 9}}, "mesh.pp",
         [" | use pipeline.stages_per_rank ≤ 8"]),
        ({"pipeline": {"stages_per_rank": 2}}, "pipeline.stages_per_rank",
         ["1f1b takes 1 per rank, not 2", "interleaved_1f1b", "zbv"]),
        ({"pipeline": {"schedule": "zbv"}}, "pipeline.stages_per_rank", []),
        ({"pipeline": {"layers_per_stage": [8]}}, "pipeline.layers_per_stage", ["1 number for 2 stages", "[4, 4]"]),
        ({"pipeline": {"layers_per_stage": [3, 3, 2]}}, "pipeline.layers_per_stage", ["3 numbers for 2", "[4, 4]"]),
        ({"pipeline": {"layers_per_stage": [4, 5]}}, "pipeline.layers_per_stage",
         ["4 + 5 = 9 layers, 1 more than model.num_layers (8)", "[4, 4]"]),
        ({"pipeline": {"layers_per_stage": [3, 3]}}, "pipeline.layers_per_stage",
         ["3 + 3 = 6 layers, 2 fewer than model.num_layers (8)", "[4, 4]"]),
        ({"pipeline": {"layers_per_stage": [8, 0]}}, "pipeline.layers_per_stage", ["stage 1 has no layers", "[4, 4]"]),
        ({"model": SHARED, "pipeline": {"layers_per_stage": [6, 6]}}, "pipeline.layers_per_stage",
         ["before layer 6 parts layers 5 to 11", "7 or more layers on the last stage"]),
        ({"model": {**SHARED, "per_layer_width": 8}}, "pipeline.layers_per_stage",
         ["parts layers 0 to 11", "use mesh.pp 1 and pipeline.stages_per_rank 1"]),
        ({"model": MOE, "mesh": {"fsdp": 4, "ep": 3}}, "mesh.ep", ["use 2 or 4"]),
        ({"model": {**MOE, "num_experts": 6}, "mesh": {"fsdp": 4, "ep": 4}}, "mesh.ep",
         ["does not divide model.num_experts"]),
        ({"mesh": {"fsdp": 2, "ep": 2}}, "mesh.ep", ["no experts"]),
        ({"model": {**MOE, "experts_per_token": 9}}, "model.experts_per_token", [" | use at most 8"]),
        ({"model": ODD, "mesh": EIGHT}, "mesh.ep",
         ["leaves 8 ranks", "expert_ffn_size 35", " | use 1 or 4,", "multiple of 8"]),
        ({"model": {**BIASED, "hidden_size": 36}, "mesh": EIGHT}, "mesh.ep",
         ["fused_down_proj_bias cannot be cut into 8", "model.hidden_size 36", " | use 1 or 4,"]),
        ({"model": {**BIASED, "expert_ffn_size": 34}, "mesh": EIGHT}, "mesh.ep",
         ["fused_gate_up_proj_bias", "model.expert_ffn_size 34"]),
        ({"model": BIASED, "mesh": EIGHT, "train": STATE}, "train.optimizer.state", ["_bias"]),
        ({"model": NARROW, "mesh": THREE, "train": STATE}, "train.optimizer.state",
         ["model.expert_ffn_size 688", "258 columns", "mesh.ep 6"]),
        ({"model": {"kind": "qwen3_5"}, "mesh": {"cp": 2}, "pipeline": {"pad_to_multiple_of": 4}},
         "pipeline.pad_to_multiple_of", ["of 2 tokens", "reads 3", "6"]),
        ({"mesh": {"cp": 3, "cp_style": "ulysses"}}, "mesh.cp", ["use 2 or 4", "ring"]),
        ({"mesh": {"cp": 2}, "pipeline": {"pad_to_multiple_of": 7}}, "pipeline.pad_to_multiple_of",
         ["7 is odd", "use 8", "ulysses"]),
        ({"mesh": {"tp": 3}}, "mesh.tp",
         ["3 does not divide model.ffn_size = 688, model.num_heads = 4, model.num_kv_heads = 4 | use 2 or 4, or"]),
        ({"model": {"kind": "olmo2", "num_kv_heads": 2}, "mesh": {"tp": 4}}, "mesh.tp",
         ["4 does not divide model.num_kv_heads = 2 | use 2,"]),
        ({"model": {"kind": "qwen3_5"}, "mesh": {"tp": 4}}, "mesh.tp", ["model.linear_num_key_heads = 2 | use 2,"]),
        ({"mesh": {"tp": 2, "dp_replicate": 2}, "train": {"sync": {"kind": "int8"}}}, "mesh.tp", ["train.sync.kind"]),
        ({"mesh": {"tp": 2}, "train": STATE}, "train.optimizer.state", ["cuts rows at 128 and 344"]),
        ({"mesh": {"tp": 4, "cp": 2, "cp_style": "ulysses"}}, "mesh.cp", ["1 query heads", "use 1"]),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_what_would(sections: dict[str, Any], key: str, words: list[str]) -> None:
    (problem,) = check_plan(job_with(**sections))
    text = f"{problem.fault} | {problem.fix}"
    assert problem.key == key and [word for word in words if word not in text] == []


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"model": MOE, "mesh": {"fsdp": 4, "ep": 2}},
        {"pipeline": {**VIRTUAL, "schedule": "looped_bfs"}},
        {"model": {"num_layers": 6}, "mesh": {"pp": 3}, "pipeline": V},
        {"model": {"num_layers": 6}, "mesh": {"pp": 3}, "pipeline": {**V, "input_weight": 0, "output_weight": 4}},
        {"model": SHARED, "pipeline": {"layers_per_stage": [5, 7]}},
        {"model": ODD, "mesh": {"fsdp": 16, "ep": 4}},
        {"model": {**BIASED, "expert_ffn_size": 36}, "mesh": EIGHT},
        {"model": NARROW, "mesh": THREE},
        {"model": {**NARROW, "expert_ffn_size": 690}, "mesh": THREE, "train": STATE},
        {"model": {**NARROW, "hidden_size": 768}, "mesh": THREE, "train": STATE},
        {"model": {"kind": "qwen3_5"}, "mesh": {"cp": 2}, "pipeline": {"pad_to_multiple_of": 6}},
        {"model": {"kind": "qwen3_5"}, "mesh": {"cp": 2, "cp_style": "ulysses"}, "pipeline": {"pad_to_multiple_of": 4}},
        {"mesh": {"cp": 3, "cp_style": "ring"}},
        {"model": {"num_heads": 4, "num_kv_heads": 1}, "mesh": {"cp": 4, "cp_style": "ulysses"}},  # each has a copy
        {"mesh": {"cp": 2, "cp_style": "ulysses"}, "pipeline": {"pad_to_multiple_of": 7}},
        {"mesh": {"tp": 4, "cp": 2}},
        {"model": {"num_kv_heads": 2, "vocab_size": 4097}, "mesh": {"tp": 4}},
    ],
)
def test_what_fits_has_no_problem(sections: dict[str, Any]) -> None:
    assert check_plan(job_with(**sections)) == []


def test_all_problems_are_reported_at_once() -> None:
    job = job_with(mesh={"pp": 9, "ep": 2}, pipeline={"microbatches": 2})
    assert [p.key for p in check_plan(job)] == ["pipeline.microbatches", "mesh.pp", "mesh.ep"]
