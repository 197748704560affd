"""Every attention kernel gives the numbers of the plain version, also hop by hop as in a ring.

The same tests run on a CPU with `varlen_reference` in place of a GPU's kernels.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from varlen_reference import reference_kernel

from raypp.job.job import Job
from raypp.job.load import parse_job
from raypp.rank.data.packing import Row
from raypp.rank.step.collate import collate, on_device
from raypp.stages.models.attention import PLAIN, AttentionKernel, packed_attention
from raypp.stages.models.documents import PackedDocuments
from raypp.stages.parallel.attention_choice import KERNELS, Setting, choose_attention, reason_against, try_kernel
from raypp.stages.parallel.context import WholeRows
from raypp.stages.parallel.ring_hops import BlockHops, FlashHops, RingHops, hop_segments
from raypp.stages.parallel.zigzag import plan_ring, zigzag

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
ON_BOTH = [pytest.param("cpu", "reference"), *(pytest.param("cuda", name, marks=pytest.mark.gpu) for name in KERNELS)]
WITH_BLOCKS = [case for case in ON_BOTH if case.values[1] not in ("cudnn", "flex", "plain")]
# Query heads, key/value heads, head width, lengths: none a multiple of 8, one token, one document.
CASES = [(8, 2, 64, (5, 20, 3, 17)), (4, 4, 128, (300, 1, 211)), (6, 1, 32, (129,)), (4, 2, 64, (128, 256, 64))]
# Relative to the norm. bf16 keeps 8 bits: a result is off by up to 2^-9 of its size, and a kernel
# rounds weights and scores as well. The reference on a CPU is within 3e-3 and 6e-7.
BOUND = {torch.bfloat16: 1e-2, torch.float32: 1e-5}


def job_of(heads: int, kv_heads: int, width: int, dtype: torch.dtype, kernel: str, cp: int = 1) -> Job:
    model = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": width, "hidden_size": heads * width}
    precision = "bf16" if dtype == torch.bfloat16 else "fp32"
    train = {"precision": precision, "attention": "auto" if kernel == "reference" else kernel}
    return parse_job({"name": "kernels", "model": model, "train": train, "mesh": {"cp": cp}})


def kernel_for(device: str, name: str, job: Job) -> AttentionKernel:
    """Returns the kernel as a rank would get it; skips the test where it cannot be used."""
    if name == "reference":
        return reference_kernel()
    reason = reason_against(name, Setting.of(job, torch.device(device)))
    if reason is not None:
        pytest.skip(f"{name}: {reason}")
    return choose_attention(job, torch.device(device)).kernel


def inputs(tokens: int, heads: int, kv_heads: int, width: int, dtype: torch.dtype) -> list[Tensor]:
    """Returns queries, keys, values and the output's gradient on the host."""
    generator = torch.Generator().manual_seed(tokens)
    counts = (heads, kv_heads, kv_heads, heads)
    return [torch.randn(tokens, count, width, generator=generator).to(dtype) for count in counts]


def exact(tensors: list[Tensor], documents: PackedDocuments) -> list[Tensor]:
    """Returns output and gradients of the plain version in fp64 on the host."""
    q, k, v, grad = (tensor.double() for tensor in tensors)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = packed_attention(*leaves, replace(documents, kernel=PLAIN))
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def assert_near(found: list[Tensor], expected: list[Tensor], dtype: torch.dtype) -> None:
    for name, ours, theirs in zip(("output", "dq", "dk", "dv"), found, expected, strict=True):
        assert ours.dtype == dtype and ours.shape == theirs.shape, name
        error = float((ours.double().cpu() - theirs).norm() / theirs.norm())
        assert error <= BOUND[dtype], f"{name}: {error:.1e}"


@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "width", "lengths"), CASES)
@pytest.mark.parametrize(("device", "name"), ON_BOTH)
def test_a_kernel_gives_output_and_gradients_of_the_plain_version(
    device: str, name: str, heads: int, kv_heads: int, width: int, lengths: tuple[int, ...], dtype: torch.dtype
) -> None:
    kernel = kernel_for(device, name, job_of(heads, kv_heads, width, dtype, name))
    documents = PackedDocuments.of_lengths(lengths, kernel=kernel)
    tensors = inputs(sum(lengths), heads, kv_heads, width, dtype)
    *leaves, grad = (tensor.to(device) for tensor in tensors)
    leaves = [x.requires_grad_() for x in leaves]
    out = packed_attention(*leaves, documents.moved(lambda t: t.to(device)))
    assert_near([out.detach(), *torch.autograd.grad(out, leaves, grad)], exact(tensors, documents), dtype)


def ring_in_turns(hops: list[RingHops], plan_columns: list[Tensor], tensors: list[Tensor]) -> list[Tensor]:
    """Computes all ranks of a ring one after the other: output and gradients of whole rows."""
    size, (q, k, v, grad) = len(hops), tensors
    wide = torch.promote_types(q.dtype, torch.float32)
    results = [torch.empty_like(q), *(torch.zeros(x.shape, dtype=wide, device=q.device) for x in (q, k, v))]
    kv = [torch.stack((k[own], v[own])) for own in plan_columns]
    for rank, own in enumerate(plan_columns):
        out = torch.empty(q[own].shape, dtype=wide, device=q.device)
        lse = torch.empty(out.shape[:2], dtype=wide, device=q.device)
        for hop in range(hops[rank].count):
            hops[rank].attend(hop, q[own], kv[(rank - hop) % size], out, lse)
        result, dq = out.to(q.dtype), torch.zeros_like(out)
        for hop in range(hops[rank].count):
            source = (rank - hop) % size
            dkv = torch.zeros(kv[source].shape, dtype=wide, device=q.device)
            hops[rank].add_gradients(hop, grad[own], q[own], kv[source], result, lse, dq, dkv)
            results[2][plan_columns[source]] += dkv[0]
            results[3][plan_columns[source]] += dkv[1]
        results[0][own], results[1][own] = result, dq
    return [result.to(q.dtype) for result in results]


RINGS = [(2, (48,)), (2, (5, 20, 3, 20)), (3, (11, 37, 48)), (4, (1, 160, 31, 192)), (4, (33, 31, 128, 192))]


@pytest.mark.parametrize(("size", "lengths"), RINGS)
@pytest.mark.parametrize(("device", "name"), WITH_BLOCKS)
def test_hops_of_a_ring_add_up_to_whole_rows(device: str, name: str, size: int, lengths: tuple[int, ...]) -> None:
    heads, kv_heads, width, row_len = 8, 2, 64, max(48, 192 * (size == 4))
    kernel = kernel_for(device, name, job_of(heads, kv_heads, width, torch.bfloat16, name, cp=size))
    assert kernel.blocks is not None
    tensors = inputs(sum(lengths), heads, kv_heads, width, torch.bfloat16)
    plans = [plan_ring(lengths, row_len, rank, size) for rank in range(size)]
    hops: list[RingHops] = [FlashHops(hop_segments(plan), kernel.blocks) for plan in plans]
    moved = [hop.moved(lambda t: t.to(device)) for hop in hops]
    chunks = torch.arange(sum(lengths)).view(-1, 2 * size, row_len // (2 * size))
    own = [chunks[:, list(zigzag(rank, size))].flatten().to(device) for rank in range(size)]
    found = ring_in_turns(moved, own, [tensor.to(device) for tensor in tensors])
    assert_near(found, exact(tensors, PackedDocuments.of_lengths(lengths)), torch.bfloat16)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_blocks_of_a_ring_add_up_to_whole_rows_in_fp32(device: str) -> None:
    size, lengths = 2, (5, 20, 3, 20)
    tensors = inputs(48, 8, 2, 64, torch.float32)
    hops: list[RingHops] = [BlockHops(plan_ring(lengths, 48, rank, size)) for rank in range(size)]
    chunks = torch.arange(48).view(-1, 2 * size, 12)
    own = [chunks[:, list(zigzag(rank, size))].flatten().to(device) for rank in range(size)]
    found = ring_in_turns(hops, own, [tensor.to(device) for tensor in tensors])
    assert_near(found, exact(tensors, PackedDocuments.of_lengths(lengths)), torch.float32)


def test_the_example_that_every_kernel_must_run_is_run_in_full() -> None:
    kernel = reference_kernel()
    try_kernel(kernel, job_of(4, 2, 16, torch.bfloat16, "reference", cp=2), CPU)
    assert (kernel.blocks.forwards, kernel.blocks.backwards) == (4, 4)  # type: ignore[union-attr]


# On a device.


@pytest.mark.gpu
def test_auto_takes_a_flash_kernel_in_bf16_on_ampere_or_later() -> None:
    job = job_of(8, 2, 128, torch.bfloat16, "auto")
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("needs compute capability 8.0")
    choice = choose_attention(job, CUDA)
    assert choice.kernel.name in ("flash3", "flash4", "cudnn", "varlen") and not choice.failed, str(choice)
    assert torch.cuda.get_device_capability()[0] != 10 or choice.kernel.name != "varlen", str(choice)


def rows(*lengths: tuple[int, ...]) -> list[Row]:
    def row(documents: tuple[int, ...]) -> Row:
        tokens = np.arange(sum(documents), dtype=np.int64)
        return Row(tokens=tokens, labels=tokens + 1, documents=documents)

    return [row(documents) for documents in lengths]


@pytest.mark.gpu
@pytest.mark.parametrize("name", KERNELS)
def test_nothing_waits_for_the_device_between_a_step_s_copy_and_the_last_backward(name: str) -> None:
    dtype = torch.float32 if name in ("flex", "plain") else torch.bfloat16
    kernel = kernel_for("cuda", name, job_of(4, 2, 64, dtype, name))
    host = [collate(rows((5, 43), (30, 18)), 48, WholeRows(), kernel) for _ in range(3)]
    options: dict[str, Any] = {"dtype": dtype, "device": "cuda", "requires_grad": True}
    q, k, v = (torch.randn(96, heads, 64, **options) for heads in (4, 2, 2))
    packed_attention(q, k, v, on_device(host, CUDA)[0].documents).sum().backward()  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        batches = on_device(host, CUDA)
        for batch in batches:
            packed_attention(q, k, v, batch.documents).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for batch, before in zip(batches, host, strict=True):
        assert torch.equal(batch.tokens_BT.cpu(), before.tokens_BT)
        assert torch.equal(batch.documents.cu_seqlens.cpu(), before.documents.cu_seqlens)


@pytest.mark.gpu
def test_grouped_heads_in_fp32_keep_no_scores_of_whole_rows() -> None:
    heads, tokens, width = 8, 4096, 64
    q, k, v = (torch.randn(tokens, n, width, device="cuda", requires_grad=True) for n in (heads, 2, 2))
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    documents = PackedDocuments.of_lengths((tokens,), kernel=PLAIN).moved(lambda t: t.to(CUDA))
    packed_attention(q, k, v, documents).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < heads * tokens**2 * 4 / 2
