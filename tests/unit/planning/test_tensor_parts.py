"""What a plan says of one rank of a tp group: its part of the weights, and of what is sent."""

from typing import Any

import pytest
from planned_jobs import job_with
from small_models import small_options

from raypp.job.job import Job
from raypp.planning.activations import layer_activation_numbers
from raypp.planning.loss_memory import loss_memory
from raypp.planning.machines import message_bytes
from raypp.planning.memory import peak_memory
from raypp.planning.sizes import sizes_of

WIDTHS: dict[str, Any] = {"hidden_size": 64, "num_heads": 8, "ffn_size": 160, "vocab_size": 512, "num_layers": 8}


def of_ranks(tp: int, *, kv_heads: int = 8, vocab: int = 512, **train: Any) -> Job:
    model = {**WIDTHS, "num_kv_heads": kv_heads, "vocab_size": vocab}
    return job_with(mesh={"tp": tp}, model=model, train=train)


def test_a_rank_has_a_part_of_each_matrix_and_whole_norms() -> None:
    whole, part = (sizes_of(of_ranks(4).model, tp) for tp in (1, 4))
    matrices, norms = 4 * 64 * 64 + 3 * 64 * 160, 2 * 64
    assert whole.layers[0].parameters == matrices + norms
    assert part.layers[0].parameters == matrices / 4 + norms
    assert (part.first, part.last) == (512 * 64 / 4, 512 * 64 / 4 + 64)
    assert part.stage_trained(range(2), first=True, last=False) == (part.first + 2 * part.layers[0].parameters, 0)


def test_matrices_without_equal_parts_are_whole_on_each_rank() -> None:
    part = sizes_of(of_ranks(4, kv_heads=2, vocab=509).model, 4)
    assert part.layers[0].parameters == (2 * 64 * 64 + 3 * 64 * 160) / 4 + 2 * 16 * 64 + 2 * 64
    assert part.first == 509 * 64


def test_experts_and_routers_are_whole_and_adapters_have_one_half_of_each_cut() -> None:
    moe = small_options("qwen3_moe")
    whole, part = (sizes_of(moe, tp).layers[-1] for tp in (1, 2))
    assert part.experts == whole.experts > 0
    attention = 2 * moe.hidden_size * moe.dim_per_head * (moe.num_heads + moe.kv_heads)
    assert whole.parameters - part.parameters == attention / 2
    adapted = job_with(mesh={"tp": 2}, model={**WIDTHS, "lora": {"rank": 4, "targets": "all-linear"}}).model
    whole, part = (sizes_of(adapted, tp).layers[0] for tp in (1, 2))
    into_residual, others = 4 * (64 + 160), 4 * (3 * 64 + 2 * 160)  # A of o_proj and down_proj; B of the others
    assert whole.trained - part.trained == (into_residual + others) / 2


@pytest.mark.parametrize(
    ("extent", "compiled", "numbers"),
    [
        ("full", False, 64 / 4),
        # the input; the sums of o_proj and down_proj; heads and inner width
        ("selective", False, (64 + 2 * 64 + 4 * 64 + 2 * 160) / 4),
        # what both blocks take; what norms take; the rest
        ("none", False, (2 * 64 + 2 * 64 + 4 * 64 + 4 * 160) / 4),
        # compiled blocks keep what they gathered
        ("none", True, 2 * 64 + (2 * 64 + 4 * 64 + 4 * 160) / 4),
    ],
)
def test_a_rank_keeps_its_tokens_and_its_heads(extent: str, compiled: bool, numbers: float) -> None:
    job = of_ranks(4, activation_checkpointing=extent, compile=compiled)
    assert layer_activation_numbers(job, 0) == numbers


def test_messages_logits_and_memory_shrink() -> None:
    alone, four = of_ranks(1), of_ranks(4)
    assert message_bytes(alone) == 4 * message_bytes(four)
    assert loss_memory(four, 4096, "cuda").forward < loss_memory(alone, 4096, "cuda").forward
    sums = [peak_memory(one, "cpu") for one in (alone, four)]
    assert sums[1] < sums[0]
