"""The correction bias of a router follows the loads of the experts, the same on every mesh."""

from typing import Any

import pytest
import torch
from comparison import assert_identical, assert_same_sums
from small_models import small_options
from training import document, numbers, thinned, trained

STEPS = 3
RATE = 0.02
MESHES = [{"fsdp": 2, "cp": 2, "ep": 4}, {"fsdp": 2, "ep": 2}, {"dp_replicate": 2}]
SHAPES = {
    "glm4_moe": {"num_experts": 8, "expert_groups": 4, "chosen_groups": 2, "routed_scale": 2.5},
    "ernie4_5_moe": {},
}


def job(kind: str, rate: float = RATE, **mesh: Any) -> dict[str, Any]:
    shape = {"num_layers": 4, "tie_embeddings": False, "router_bias_rate": rate, **SHAPES[kind]}
    options = small_options(kind, **{"num_experts": 8, **shape}).model_dump(mode="json", exclude_none=True)
    return {**document(microbatches=4, **mesh), "model": options}


def biases(found: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in found["weights"].items() if name.endswith("correction_bias")}


@pytest.mark.parametrize("kind", SHAPES)
def test_the_bias_of_a_pipeline_has_the_bits_of_one_process(kind: str) -> None:
    alone = trained(job(kind), STEPS)
    assert_identical(trained(job(kind, pp=2), STEPS), alone)
    assert len(biases(alone)) == 3 and all(bool(bias.any()) for bias in biases(alone).values())
    # Each step moves each bias once, by the rate.
    assert all(float((bias / RATE - (bias / RATE).round()).abs().max()) < 1e-5 for bias in biases(alone).values())


@pytest.mark.parametrize("mesh", thinned(MESHES, MESHES[:1]), ids=str)
def test_the_bias_counts_the_choices_of_all_ranks(mesh: dict[str, int]) -> None:
    found, alone = numbers(job("glm4_moe", **mesh), STEPS), numbers(job("glm4_moe"), STEPS)
    assert_same_sums(found, alone)
    assert biases(found.wide) and all(bool(bias.any()) for bias in biases(found.wide).values())
    assert all(torch.equal(bias, biases(alone.wide)[name]) for name, bias in biases(found.wide).items())


def test_a_rate_of_zero_leaves_the_bias_as_it_is() -> None:
    assert not any(bool(bias.any()) for bias in biases(trained(job("glm4_moe", rate=0.0), STEPS)).values())
