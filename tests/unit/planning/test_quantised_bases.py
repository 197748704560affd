"""Plans of jobs with a quantised base count the bytes that its stages hold."""

from typing import Any

import pytest
from planned_jobs import job_with
from torch import nn

from raypp.job.job import Job
from raypp.job.lora import BASES
from raypp.planning.check import check_plan
from raypp.planning.costs import DEVICES, Costs, Part, computed_costs, dequantise_seconds
from raypp.planning.forecast import forecast
from raypp.planning.machines import Machines
from raypp.planning.memory import base_bytes, product_bytes
from raypp.planning.plan import make_plan
from raypp.stages.models.quantised import store_rest
from raypp.stages.models.stage import build_stage
from raypp.stages.parallel.apply import compute_dtype

EXPERTS = {"num_experts": 4, "experts_per_token": 2, "expert_ffn_size": 192}


def job_of(base: str, kind: str = "llama", model: dict[str, Any] | None = None, **sections: Any) -> Job:
    more = {} if kind == "llama" else EXPERTS
    sizes = {"kind": kind, "ffn_size": 704, **more, **(model or {})}
    return job_with(model={**sizes, "lora": {"rank": 8, "base": base}}, **sections)


def held(job: Job, layers: range, **ends: bool) -> nn.Module:
    stage = build_stage(job.model, layers, **ends)
    store_rest(stage, compute_dtype(job))
    return stage


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("base", BASES)
def test_bytes_are_those_of_the_stage_that_is_built(base: str, kind: str, precision: str) -> None:
    job = job_of(base, kind, train={"precision": precision})
    rest = 2 if precision == "bf16" else 4
    for layers, first, last in ((range(3), True, False), (range(3, 8), False, True)):
        parameters = list(held(job, layers, first=first, last=last).parameters())
        expected = sum(p.numel() * p.element_size() for p in parameters if not p.requires_grad)
        assert base_bytes(job.model, layers, first=first, last=last, rest=rest) == expected


def test_memory_is_that_of_the_bytes_and_of_one_dequantised_matrix() -> None:
    train = {"precision": "bf16"}
    plain, four = (make_plan(job_of(base, train=train)) for base in ("bf16", "nf4"))
    for rank in (0, 1):
        assert four.memory[rank].weights < plain.memory[rank].weights
        assert four.memory[rank].optimizer == plain.memory[rank].optimizer
        assert four.memory[rank].gathered == plain.memory[rank].gathered  # of the adapters only
    assert product_bytes(job_of("nf4").model, 2) == 2 * 704 * 256
    assert product_bytes(job_of("nf4", "qwen3_moe").model, 2) == 2 * 256 * 256  # one expert is smaller than q_proj
    assert product_bytes(job_of("nf4", "qwen3_moe").model, 2, together=True, ep=2) == 2 * 2 * 192 * 256
    assert product_bytes(job_of("bf16", train=train).model, 2) == 0


@pytest.mark.parametrize("device", ["cpu", "rtx4090"])
def test_each_forward_and_backward_dequantises(device: str) -> None:
    def layer(base: str, recompute: str = "none") -> Part:
        train = {"precision": "bf16", "activation_checkpointing": recompute, "micro_batch_size": 512}
        return computed_costs(job_of(base, train=train), DEVICES[device]).layer  # longer than its launches

    plain, once = layer("bf16"), dequantise_seconds(job_of("nf4", train={"precision": "bf16"}), DEVICES[device])
    assert once > 0 and dequantise_seconds(job_of("bf16", train={"precision": "bf16"}), DEVICES[device]) == 0
    assert layer("nf4").forward - plain.forward == pytest.approx(once)
    assert layer("nf4").backward - plain.backward == pytest.approx(once)
    assert layer("nf4", "full").backward - layer("bf16", "full").backward == pytest.approx(2 * once)
    assert layer("int8").forward < layer("nf4").forward


def test_experts_of_a_quantised_base_are_cut_between_rows() -> None:
    def problems(base: str, width: int) -> list[str]:
        job = job_of(base, "qwen3_moe", {"expert_ffn_size": width}, mesh={"fsdp": 4, "ep": 2})
        return [problem.fault for problem in check_plan(job) if problem.key == "mesh.ep"]

    assert problems("int8", 192) == []
    assert problems("fp32", 193) == []
    (said,) = problems("int8", 193)
    assert "matrices in int8 are cut between rows (model.expert_ffn_size 193, model.hidden_size 256" in said


@pytest.mark.parametrize("base", BASES)
def test_what_is_gathered_is_the_quantised_integers(base: str) -> None:
    job = job_of(base, train={"precision": "bf16"}, mesh={"pp": 1, "fsdp": 2})
    weights = list(held(job, range(8), first=True, last=True).parameters())
    sizes = [2 if weight.requires_grad else weight.element_size() for weight in weights]
    gathered = sum(weight.numel() * size for weight, size in zip(weights, sizes, strict=True))
    part = Part(1.0, 2.0)
    found = forecast(job, Machines.alike(2, 1, 1.0), Costs(part, part, part))
    assert found.parts["unshard"] == pytest.approx(gathered / 2 * 8e-9)


@pytest.mark.parametrize("ep", [1, 2, 4])
def test_quantised_experts_are_gathered_over_every_ep_th_rank(ep: int) -> None:
    job = job_of("nf4", "qwen3_moe", mesh={"pp": 1, "fsdp": 4, "ep": ep})
    rest = experts = 0
    for name, weight in held(job, range(8), first=True, last=True).named_parameters():
        size = weight.numel() * weight.element_size()
        rest, experts = (rest, experts + size) if ".experts." in name else (rest + size, experts)
    assert experts > 0
    part = Part(1.0, 2.0)
    found = forecast(job, Machines.alike(4, 1, 1.0), Costs(part, part, part))
    assert found.parts["unshard"] == pytest.approx((rest * 3 / 4 + experts * (1 / ep - 1 / 4)) * 8e-9)
