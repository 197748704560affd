"""Adapters in bf16 only, and with their state in host memory: no mesh changes the numbers."""

from typing import Any

import pytest
import torch
from comparison import assert_identical
from test_lora import LAYERS, UPPER
from test_lora import document as plain
from test_optimizer_offload import in_small_blocks
from test_quantised_base import document as quantised
from training import thinned, trained

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


JOBS = {
    ("all", "pp"): pure("all", pp=2),
    ("upper", "pp"): pure("upper", pp=2),
    ("nf4, 8bit", "split"): pure("nf4, 8bit", "zbv", pp=2),
    ("experts", "pp"): pure("experts", pp=2),
    ("all", "fsdp"): pure("all", fsdp=2),
    ("nf4, 8bit", "fsdp"): pure("nf4, 8bit", fsdp=2),
    ("experts", "ep"): pure("experts", fsdp=2, ep=2),
}
PIPELINES = [case for case in JOBS if case[1] in ("pp", "split")]
OTHERS = [case for case in JOBS if case[1] in ("fsdp", "ep")]


@pytest.mark.parametrize(("model", "way"), thinned(PIPELINES, [], [("nf4, 8bit", "split")]))
def test_a_pipeline_of_bf16_adapters_gives_the_bits_of_one_process(model: str, way: str) -> None:
    assert_identical(trained(JOBS[model, way]), trained(pure(model)))


@pytest.mark.parametrize(("model", "way"), thinned(OTHERS, []))
def test_on_data_parallel_meshes_the_loss_is_that_of_one_process(model: str, way: str) -> None:
    ours, theirs = trained(JOBS[model, way]), trained(pure(model))
    assert ours["tokens"] == theirs["tokens"]
    # As in test_low_memory: sums in another order may move a weight to the next bf16 number.
    assert ours["loss"][0] == pytest.approx(theirs["loss"][0], rel=1e-6)
    assert ours["loss"][1:] == pytest.approx(theirs["loss"][1:], rel=1e-3)


@pytest.mark.parametrize("way", thinned(["all", "nf4, 8bit"], ["nf4, 8bit"]))
def test_all_weights_are_bf16_and_only_adapters_move(way: str) -> None:
    weights, again = (trained(pure(way), steps)["weights"] for steps in (3, 1))
    assert {value.dtype for value in weights.values()} == {torch.bfloat16} | ({torch.uint8} if "nf4" in way else set())
    moved = {name for name, value in weights.items() if not torch.equal(again[name], value)}
    assert moved == {name for name in weights if ".lora_" in name}
    assert len(moved) >= 2 * LAYERS


BF16_COPIES = {"precision": "bf16"}
OFFLOADED = {
    "fp32, pp": plain(mesh={"pp": 2}),
    "bf16, a stage trains nothing": plain(UPPER, mesh={"pp": 2}, train=BF16_COPIES, model=UPPER_BF16),
    "bf16, nf4, fsdp": quantised(mesh={"fsdp": 2}, train=BF16_COPIES),
    "bf16_pure, 8bit, fsdp": quantised(mesh={"fsdp": 2}, train=PURE | IN_8_BITS),
    "experts over ranks": plain(kind="qwen3_moe", mesh={"fsdp": 2, "ep": 2}),
}


@pytest.mark.parametrize("name", thinned(OFFLOADED, [], ["bf16_pure, 8bit, fsdp"]))
def test_offloading_the_state_of_adapters_changes_no_bit(name: str) -> None:
    job, found = OFFLOADED[name], []
    for offload in (True, False):
        train = {**job["train"], "optimizer": {**job["train"]["optimizer"], "offload": offload}}
        found.append(trained({**job, "train": train}, train=in_small_blocks))
    assert_identical(*found)
