"""Counts what autograd saves in real layers and compares it with the plan's counts."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from planned_jobs import job_with

from raypp.job.job import Job
from raypp.planning.activations import microbatch_tokens, split_backward_bytes, stage_activation_bytes
from raypp.planning.loss_memory import loss_memory
from raypp.stages.models.adapter_dropout import StepKeys
from raypp.stages.models.documents import PackedDocuments
from raypp.stages.models.loss import token_loss_sum
from raypp.stages.models.products import LaterGradients, weights_later
from raypp.stages.models.stage import build_stage

MOE = {"kind": "mixtral", "num_experts": 4, "experts_per_token": 2, "expert_ffn_size": 128, "num_kv_heads": 2}


def saved_bytes(job: Job, *, last: bool, loss: bool = False) -> int:
    """Returns the bytes of the storages that a stage's forward keeps, parameters left out."""
    stage = build_stage(job.model, range(1), first=False, last=last).to_empty(device="cpu")
    for parameter in stage.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    rows, length = job.train.micro_batch_size, job.data.seq_len
    given = torch.randn(rows, length, job.model.hidden_size, requires_grad=True)
    own = {parameter.untyped_storage().data_ptr() for parameter in stage.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    keys_S = StepKeys(0, 1, 0).of(0, rows, np.arange(length))
    documents = replace(PackedDocuments.of_rows([[length]] * rows, length), keys_S=keys_S)
    positions = torch.arange(length).repeat(rows, 1)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = stage(given, positions, documents)
        if loss:
            token_loss_sum(out, torch.zeros(rows, length, dtype=torch.int64))
    kept[out.untyped_storage().data_ptr()] = out  # the stage's output is kept as well
    return sum(tensor.untyped_storage().nbytes() for place, tensor in kept.items() if place not in own)


DELTA = {"kind": "qwen3_5", "linear_key_head_dim": 64, "layer_types": ["linear_attention"] * 8}
CONV, NAMED = ({"kind": "lfm2", "num_kv_heads": 2, "layer_types": [kind] * 8} for kind in ("conv", "full_attention"))
WINDOW = {"kind": "mistral", "sliding_window": 16, "num_kv_heads": 2}
GEMMA2, GEMMA3 = ({"kind": kind, "sliding_window": 16, "num_kv_heads": 2} for kind in ("gemma2", "gemma3"))


LATENT = {
    "kind": "deepseek_v3", "dense_layers": 64, "q_lora_rank": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 48,
    "v_head_dim": 64,
}  # fmt: skip


def left_bytes(job: Job) -> int:
    """Returns the bytes of the storages that the I half of a stage's backward leaves for W."""
    stage = build_stage(job.model, range(1), first=False, last=False).to_empty(device="cpu")
    for parameter in stage.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    rows, length = job.train.micro_batch_size, job.data.seq_len
    given, later = torch.randn(rows, length, job.model.hidden_size, requires_grad=True), LaterGradients()
    documents = PackedDocuments.of_rows([[length]] * rows, length)
    with weights_later(later):
        out = stage(given, torch.arange(length).repeat(rows, 1), documents)
        out.backward(torch.ones_like(out))
    held: Any = [(*gradient.args, *(gradient.keywords or {}).values()) for _, gradient in later._left]
    tensors = [one for ones in held for one in ones if isinstance(one, torch.Tensor)]
    return sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}.values())


@pytest.mark.parametrize(
    "model",
    [{}, {"num_kv_heads": 2}, MOE, {"kind": "gemma2", "num_kv_heads": 2}, {"kind": "starcoder2"}, LATENT, DELTA, CONV],
    ids=["llama", "grouped", "experts", "gemma2", "starcoder2", "latent", "delta rule", "convolution"],
)
def test_a_split_backward_leaves_what_the_plan_counts(model: dict[str, Any]) -> None:
    job = job_with(model=model, data={"seq_len": 64}, train={"micro_batch_size": 2})
    planned = microbatch_tokens(job) * split_backward_bytes(job, 1, [1, 1, 1])
    assert planned == pytest.approx(left_bytes(job), rel=0.02)


@pytest.mark.parametrize(
    "model",
    [
        {},
        {"num_kv_heads": 2},
        MOE,
        WINDOW,
        GEMMA2,
        GEMMA3,
        {"kind": "starcoder2"},
        {"kind": "stablelm"},
        LATENT,
        DELTA,
        CONV,
        NAMED,
    ],
    ids=[
        "llama",
        "grouped",
        "experts",
        "window",
        "gemma2",
        "gemma3",
        "starcoder2",
        "stablelm",
        "latent",
        "delta rule",
        "convolution",
        "named norms",
    ],
)
def test_a_stage_keeps_what_the_plan_counts(model: dict[str, Any]) -> None:
    job = job_with(model=model, data={"seq_len": 64}, train={"micro_batch_size": 2})
    planned = microbatch_tokens(job) * stage_activation_bytes(job, 1, [1, 1, 1], "cpu")
    # Beside it: one number per head, row or norm, and the routing of tokens.
    assert planned == pytest.approx(saved_bytes(job, last=False), rel=0.02)


def test_dropout_of_adapters_keeps_what_the_plan_counts() -> None:
    def both(dropout: float) -> tuple[int, int]:
        lora = {"rank": 4, "base": "fp32", "dropout": dropout}
        job = job_with(model={"lora": lora}, data={"seq_len": 64}, train={"micro_batch_size": 2})
        planned = microbatch_tokens(job) * stage_activation_bytes(job, 1, [1, 1, 1], "cpu")
        return planned, saved_bytes(job, last=False)

    (planned, saved), (planned_without, saved_without) = both(0.1), both(0.0)
    assert planned - planned_without == pytest.approx(saved - saved_without, rel=0.02)


def test_the_loss_keeps_what_the_plan_counts() -> None:
    job = job_with(data={"seq_len": 64}, train={"micro_batch_size": 2})
    tokens = microbatch_tokens(job)
    planned = loss_memory(job, tokens, "cpu").kept + tokens * stage_activation_bytes(job, 2, [1, 1, 1], "cpu")
    assert planned == pytest.approx(saved_bytes(job, last=True, loss=True), rel=0.02)
