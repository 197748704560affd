"""Adapters in bf16 only, and with their state in host memory: no mesh changes the numbers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from comparison import assert_identical
from test_lora import LAYERS, UPPER
from test_lora import document as plain
from test_optimizer_offload import in_small_blocks
from test_quantised_base import document as quantised
from training import Batch, thinned

pytestmark = pytest.mark.ranks

STEPS = 3
PURE, IN_8_BITS = {"precision": "bf16_pure"}, {"optimizer": {"kind": "adamw", "lr": 1e-2, "state": "8bit"}}
BF16 = {"lora": {"rank": 4, "alpha": 64, "base": "bf16"}}
UPPER_BF16 = {"lora": {**BF16["lora"], "targets": UPPER}}


def pure(way: str, schedule: str = "1f1b", **mesh: int) -> dict[str, Any]:
    stages = {"stages_per_rank": 1 if schedule == "1f1b" else 2}
    if way == "nf4, 8bit":
        return quantised(schedule=schedule, mesh=mesh, pipeline=stages, train=PURE | IN_8_BITS)
    kind = "qwen3_moe" if way == "experts" else "llama"
    model = UPPER_BF16 if way == "upper" else BF16
    return plain(kind=kind, schedule=schedule, mesh=mesh, pipeline=stages, train=PURE, model=model)


ONE = Batch(1, {way: pure(way) for way in ("all", "upper", "experts", "nf4, 8bit")}, STEPS)
TWO = Batch(
    2,
    {
        ("all", "pp"): pure("all", pp=2),
        ("upper", "pp"): pure("upper", pp=2),
        ("nf4, 8bit", "split"): pure("nf4, 8bit", "zbv", pp=2),
        ("experts", "pp"): pure("experts", pp=2),
        ("all", "fsdp"): pure("all", fsdp=2),
        ("nf4, 8bit", "fsdp"): pure("nf4, 8bit", fsdp=2),
        ("experts", "ep"): pure("experts", fsdp=2, ep=2),
    },
    STEPS,
)


PIPELINES = [case for case in TWO.jobs if case[1] in ("pp", "split")]
OTHERS = [case for case in TWO.jobs if case[1] in ("fsdp", "ep")]


@pytest.mark.parametrize(("model", "way"), thinned(PIPELINES, [], [("nf4, 8bit", "split")]))
def test_a_pipeline_of_bf16_adapters_gives_the_bits_of_one_process(model: str, way: str) -> None:
    assert_identical(TWO[model, way], ONE[model])


@pytest.mark.parametrize(("model", "way"), thinned(OTHERS, []))
def test_on_data_parallel_meshes_the_loss_is_that_of_one_process(model: str, way: str) -> None:
    ours, theirs = TWO[model, way], ONE[model]
    assert ours["tokens"] == theirs["tokens"]
    # As in test_low_memory: sums in another order may move a weight to the next bf16 number.
    assert ours["loss"][0] == pytest.approx(theirs["loss"][0], rel=1e-6)
    assert ours["loss"][1:] == pytest.approx(theirs["loss"][1:], rel=1e-3)


@pytest.mark.parametrize("way", thinned(["all", "nf4, 8bit"], ["nf4, 8bit"]))
def test_all_weights_are_bf16_and_only_adapters_move(way: str) -> None:
    weights, again = ONE[way]["weights"], Batch(1, {"": pure(way)}, 1)[""]["weights"]
    assert {value.dtype for value in weights.values()} == {torch.bfloat16} | ({torch.uint8} if "nf4" in way else set())
    moved = {name for name, value in weights.items() if not torch.equal(again[name], value)}
    assert moved == {name for name in weights if ".lora_" in name}
    assert len(moved) >= 2 * LAYERS


def offload_cases() -> dict[str, dict[str, Any]]:
    bf16 = {"precision": "bf16"}
    return {
        "fp32, pp": plain(mesh={"pp": 2}),
        "bf16, a stage trains nothing": plain(UPPER, mesh={"pp": 2}, train=bf16, model=UPPER_BF16),
        "bf16, nf4, fsdp": quantised(mesh={"fsdp": 2}, train=bf16),
        "bf16_pure, 8bit, fsdp": quantised(mesh={"fsdp": 2}, train=PURE | IN_8_BITS),
        "experts over ranks": plain(kind="qwen3_moe", mesh={"fsdp": 2, "ep": 2}),
    }


def with_offload(job: dict[str, Any], offloaded: bool) -> dict[str, Any]:
    found = copy.deepcopy(job)
    found["train"]["optimizer"] = {**found["train"]["optimizer"], "offload": offloaded}
    return found


OFFLOADED = Batch(
    2,
    {(name, on): with_offload(job, on) for name, job in offload_cases().items() for on in (False, True)},
    STEPS,
    train=in_small_blocks,
)


@pytest.mark.parametrize("name", thinned(offload_cases(), [], ["bf16_pure, 8bit, fsdp"]))
def test_offloading_the_state_of_adapters_changes_no_bit(name: str) -> None:
    assert_identical(OFFLOADED[name, True], OFFLOADED[name, False])
