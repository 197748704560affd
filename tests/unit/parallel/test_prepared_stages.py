"""A stage after its preparation: what is recomputed, what is sharded, in which dtype it sums."""

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from raypp.job.load import parse_job
from raypp.stages.models.documents import PackedDocuments
from raypp.stages.models.quantised import stored_formats
from raypp.stages.models.stage import build_stage
from raypp.stages.parallel.apply import PreparedStage, prepare_stage
from raypp.stages.parallel.compute_copies import computing
from raypp.stages.parallel.expert import moe_blocks

CPU = torch.device("cpu")
SIZES = {"num_layers": 2, "hidden_size": 64, "num_heads": 2, "ffn_size": 64, "vocab_size": 31}
EXPERTS = {"kind": "qwen3_moe", "num_experts": 4, "experts_per_token": 2, "expert_ffn_size": 64}
DELTA = {"kind": "qwen3_5", "layer_types": ["linear_attention", "full_attention"]}
QUANTISED = {"lora": {"rank": 4, "base": "nf4"}}


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def prepared(
    *shape: int,
    model: dict[str, Any] | None = None,
    mesh: dict[str, Any] | None = None,
    groups: Any = None,
    **train: Any,
) -> PreparedStage:
    """Prepares the only stage of a small job; its weights are sharded over a mesh of `shape`."""
    document = {
        "name": "prepared", "model": {**SIZES, **(model or {})}, "data": {"kind": "synthetic", "seq_len": 16},
        "mesh": {"pp": 1, **(mesh or {})}, "train": train,
    }  # fmt: skip
    job = parse_job(document)
    names = ("dp_replicate", "fsdp")[-len(shape) :]
    data_mesh = init_device_mesh("cpu", shape, mesh_dim_names=names) if shape else None
    stage = build_stage(job.model, range(2), first=True, last=True)
    return prepare_stage(stage, job, data_mesh, CPU, groups)


def blocks(stage: nn.Module) -> list[Any]:
    return list(stage.get_submodule("model.layers").children())


@pytest.mark.parametrize("extent", ["none", "selective", "full"])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_block_is_recomputed_in_one_place(extent: str, compiled: bool) -> None:
    module = prepared(activation_checkpointing=extent, compile=compiled).module
    within = compiled and extent == "selective"
    for block in blocks(module):
        assert isinstance(block.feed, partial) == within
        assert isinstance(block.forward, partial) == (extent != "none" and not within)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_bf16_weights_sum_their_gradients_in_the_dtype_of_the_job(dtype: str) -> None:
    module = prepared(precision="bf16_pure", reduce_dtype=dtype).module
    for parameter in module.parameters():
        assert parameter.dtype == torch.bfloat16
        assert (parameter.grad_dtype is torch.float32) == (dtype == "fp32")


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("sums", ["fp32", "bf16"])
@pytest.mark.parametrize(("shape", "dtype"), [((), torch.float32), ((1,), torch.bfloat16)])
def test_what_a_family_declares_is_in_fp32_beside_bf16_weights(
    shape: tuple[int, ...], dtype: torch.dtype, sums: str
) -> None:
    module: Any = prepared(*shape, model=DELTA, precision="bf16_pure", reduce_dtype=sums).module
    tokens = torch.arange(16)[None]
    with torch.no_grad():
        for parameter in module.parameters():
            (parameter.to_local() if shape else parameter).normal_(0, 0.3)
    with computing([module]):
        for _ in range(2):
            module(tokens, tokens, PackedDocuments.of_rows([[16]], 16)).float().square().sum().backward()
    wide = {name: parameter for name, parameter in module.named_parameters() if parameter.dtype == torch.float32}
    assert {*wide} == {f"model.layers.0.linear_attn.{name}" for name in ("A_log", "dt_bias", "conv1d.weight")}
    assert {parameter.grad.dtype for parameter in wide.values()} == {dtype}
    frozen = prepared(model={**DELTA, "lora": {"base": "bf16"}}, precision="bf16_pure").module
    assert {parameter.dtype for parameter in frozen.parameters()} == {torch.bfloat16}


def test_bf16_weights_leave_a_quantised_base_as_it_is() -> None:
    module = prepared(model=QUANTISED, precision="bf16_pure").module
    dtypes = {module.get_parameter(name).dtype for name, _ in stored_formats(module)}
    assert dtypes == {torch.uint8}


def test_experts_are_balanced_over_the_whole_microbatch() -> None:
    up = object()
    module = prepared(model=EXPERTS, groups=SimpleNamespace(experts=None, tokens=up, tensor=None)).module
    assert [block.microbatch_group for block in moe_blocks(module)] == [up, up]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("train", "late"),
    [
        ({}, True),
        ({"precision": "bf16"}, True),
        ({"precision": "bf16", "reduce_dtype": "bf16"}, False),
        ({"precision": "bf16_pure"}, False),
    ],
)
def test_sums_end_late_only_where_they_are_the_gradients_themselves(train: dict[str, Any], late: bool) -> None:
    assert prepared(1, **train).replica_sums is None
    assert (prepared(1, 1, **train).replica_sums is not None) == late


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("ep", "sharded"), [(1, True), (2, False)])
def test_quantised_experts_that_no_two_ranks_share_are_not_sharded(ep: int, sharded: bool) -> None:
    module = prepared(1, model={**EXPERTS, **QUANTISED}, mesh={"fsdp": 2, "ep": ep}).module
    for block in moe_blocks(module):
        for name, _ in stored_formats(block.experts):
            assert isinstance(block.experts.get_parameter(name), DTensor) == sharded


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_gradients_of_two_microbatches_are_summed_in_the_dtype_of_the_job(dtype: str) -> None:
    module: Any = prepared(1, precision="bf16", reduce_dtype=dtype).module
    generator, tokens = torch.Generator().manual_seed(0), torch.arange(16)[None]
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.to_local().normal_(0, 0.3, generator=generator)
    for last in (False, True):
        module.set_requires_gradient_sync(last)
        module(tokens + last, tokens, PackedDocuments.of_rows([[16]], 16)).float().square().sum().backward()
    gradients = torch.cat([parameter.grad.to_local().flatten() for parameter in module.parameters()])
    assert gradients.dtype == torch.float32
    assert torch.equal(gradients, gradients.bfloat16().float()) == (dtype == "bf16")


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_rank_alone_has_the_gradients_of_fsdp_without_it(dtype: str) -> None:
    generator, tokens = torch.Generator().manual_seed(0), torch.arange(16)[None]
    alone: Any = prepared(precision="bf16", reduce_dtype=dtype).module
    sharded: Any = prepared(1, precision="bf16", reduce_dtype=dtype).module
    pairs = list(zip(alone.parameters(), sharded.parameters(), strict=True))
    with torch.no_grad():
        for plain, parameter in pairs:
            parameter.to_local().copy_(plain.normal_(0, 0.3, generator=generator))

    def microbatch(module: Any, shift: int) -> None:
        module(tokens + shift, tokens, PackedDocuments.of_rows([[16]], 16)).float().square().sum().backward()

    with computing([alone]):
        assert {parameter.dtype for parameter in alone.parameters()} == {torch.bfloat16}
        for shift in (0, 1):
            microbatch(alone, shift)
    for shift in (0, 1):
        sharded.set_requires_gradient_sync(bool(shift))
        microbatch(sharded, shift)
    for plain, parameter in pairs:
        assert plain.dtype == torch.float32
        assert torch.equal(plain.grad, parameter.grad.to_local())
