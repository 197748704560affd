"""Gradients summed in every backward (mesh.reduce_gradients): the numbers of one process."""

from typing import Any

import pytest
import torch
from comparison import assert_identical, assert_same_sums
from harness import run_ranks
from test_outer_sync import Weights, outer, train
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from training import document, numbers, seat_of, thinned, trained

from raypp.job.load import parse_job
from raypp.tools.parity import train_some_steps
from raypp.torch_private import fsdp_shards

EXPERTS = {"kind": "qwen3_moe", "num_experts": 4, "experts_per_token": 2, "expert_ffn_size": 24}
TWO = {"stages_per_rank": 2}
SETTINGS: dict[str, dict[str, Any]] = {
    "pp 2, fsdp 2": {"pp": 2, "fsdp": 2},
    "pp 2, fsdp 2, zbv": {"pp": 2, "fsdp": 2, "schedule": "zbv", "pipeline": TWO},
    "pp 2, fsdp 2, zero bubble, freed": {
        "pp": 2, "fsdp": 2, "schedule": "interleaved_zero_bubble", "pipeline": TWO, "reshard_after_forward": True,
    },
    "fsdp 4, weights freed": {"fsdp": 4, "reshard_after_forward": True},
    "dp 2, fsdp 2": {"dp_replicate": 2, "fsdp": 2, "microbatches": 16},
    "pp 2, dp 2, fsdp 2, zbv": {
        "pp": 2, "dp_replicate": 2, "fsdp": 2, "microbatches": 16, "schedule": "zbv", "pipeline": TWO,
    },
    "pp 2, cp 2": {"pp": 2, "cp": 2},
    "ep 2": {"fsdp": 2, "ep": 2, "model": EXPERTS},
    "fsdp 4, ep 2": {"fsdp": 4, "ep": 2, "model": EXPERTS},
    "tied": {"pp": 2, "fsdp": 2, "model": {"tie_embeddings": True}},
    "adapters": {"pp": 2, "fsdp": 2, "model": {"lora": {"rank": 4, "base": "fp32"}}},
}  # fmt: skip
QUICK = ("pp 2, dp 2, fsdp 2, zbv",)
PURE = {"precision": "bf16_pure"}


def case(name: str, **changes: Any) -> dict[str, Any]:
    settings = {"reduce_gradients": "each_microbatch", **SETTINGS[name], **changes}
    return document(**settings)


@pytest.mark.parametrize("name", thinned(SETTINGS, QUICK, ("ep 2", "pp 2, fsdp 2, zero bubble, freed")))
def test_sums_in_every_backward_add_up_what_one_process_does(name: str) -> None:
    alone = {key: value for key, value in SETTINGS[name].items() if key in ("model", "microbatches")}
    assert_same_sums(numbers(case(name)), numbers(document(**alone)))


@pytest.mark.parametrize(
    "name", thinned([name for name in SETTINGS if name.startswith("pp 2, fsdp 2")], ["pp 2, fsdp 2, zbv"])
)
def test_a_cut_does_not_change_the_bits(name: str) -> None:
    one = document(fsdp=2, reduce_gradients="each_microbatch", train=PURE)
    assert_identical(trained(case(name, train=PURE)), trained(one))


def test_bf16_weights_get_gradients_that_are_summed_in_fp32_and_rounded_once() -> None:
    found = [trained(document(fsdp=2, reduce_gradients=when, train=PURE), 1)["gradients"][0] for when in
             ("each_microbatch", "last_microbatch")]  # fmt: skip
    same = total = 0
    for name, value in found[0].items():
        same += int((value == found[1][name]).sum())
        total += value.numel()
    # Sums of four microbatches that are rounded to 8 bits each time agree in two of three values.
    assert same >= 0.99 * total, f"{same / total:.1%}"


def whole_gradients(rank: int, world: int, port: int, document: dict[str, Any]) -> list[int]:
    """Trains a step. Returns how many whole gradients the rank holds after each backward."""
    job, found = parse_job(document), []

    def watch(step: int, runner: Any) -> None:
        runtime = runner.built.runtime
        backward = runtime._backward

        def counted(*arguments: Any) -> None:
            backward(*arguments)
            parts = [m for s in runtime.planned.values() for m in s.submod.modules() if isinstance(m, FSDPModule)]
            records = [record for part in parts for record, *_ in fsdp_shards(part)]
            held = sum(
                one.unsharded_accumulated_grad is not None or one.unsharded_param.grad is not None for one in records
            )
            shards = sum(isinstance(one.sharded_param.grad, DTensor) for one in records)
            found.append(held if held or not shards else -shards)

        for computation, do in runtime._do.items():
            if getattr(do, "func", None) == backward:
                runtime._do[computation] = lambda *a, kind=do.args[0]: counted(kind, *a)

    train_some_steps(job, seat_of(rank, world, port, job, device="cpu"), 1, lambda *_: None, before=watch)
    return found


def test_between_backwards_a_rank_holds_its_shares_only() -> None:
    each, _ = run_ranks(2, whole_gradients, document(fsdp=2, reduce_gradients="each_microbatch"))
    assert len(each) == 4 and max(each) < 0
    last, _ = run_ranks(2, whole_gradients, document(fsdp=2, reduce_gradients="last_microbatch"))
    assert min(last[:-1]) > 0


def apart(rank: int, world: int, port: int, job: dict[str, Any]) -> list[Weights]:
    torch.set_default_dtype(torch.float64)
    return train(rank, world, port, job, 4)


@pytest.mark.slow
def test_replicas_that_train_apart_add_up_the_same_in_every_backward() -> None:
    ways = []
    for when in ("each_microbatch", "last_microbatch"):
        job = document(dp_replicate=2, fsdp=2, microbatches=16, train=outer(), reduce_gradients=when)
        ways.append(run_ranks(4, apart, {**job, "checkpoint": {"every_steps": 0, "memory_tier": False}}))
    for each, last in zip(*ways, strict=True):
        assert len(each) == 4
        for ours, theirs in zip(each, last, strict=True):
            assert all((ours[name] - theirs[name]).abs().max() < 1e-10 for name in theirs)
