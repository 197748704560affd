"""The calls of torch's variable-length kernels on the meta device: arguments, shapes, dtypes.

Nothing is computed; `tests/gpu` compares the numbers.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import current_flash_attention_impl

from raypp.errors import RayppError
from raypp.job.layer_rules import AttentionRule
from raypp.stages.models.attention import packed_attention
from raypp.stages.models.cudnn_attention import CUDNN
from raypp.stages.models.documents import PackedDocuments
from raypp.stages.models.varlen_attention import varlen_kernel
from raypp.stages.parallel.ring_hops import FlashHops, hop_segments
from raypp.stages.parallel.zigzag import plan_ring


def on_meta(tensor: Tensor) -> Tensor:
    return tensor.to("meta")


def heads(tokens: int, count: int) -> Tensor:
    return torch.empty(tokens, count, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)


def test_packed_documents_with_fewer_key_value_heads_are_one_call() -> None:
    documents = PackedDocuments.of_rows([[5, 20, 3], [28]], 30, kernel=varlen_kernel("varlen")).moved(on_meta)
    q, k, v = heads(60, 8), heads(60, 2), heads(60, 2)
    out = packed_attention(q, k, v, documents)
    out.sum().backward()
    assert (out.shape, out.dtype) == ((60, 8, 64), torch.bfloat16)
    assert all(x.grad is not None and x.grad.shape == x.shape for x in (q, k, v))


@pytest.mark.parametrize("rule", [AttentionRule(window=7, scale=0.1), AttentionRule(window=7, sinks=True)], ids=str)
def test_windows_scales_and_sinks_are_arguments_of_the_call(rule: AttentionRule) -> None:
    documents = PackedDocuments.of_rows([[5, 20, 3], [28]], 30, kernel=varlen_kernel("varlen")).moved(on_meta)
    leaves = [heads(60, 8), heads(60, 2), heads(60, 2)]
    sinks = [torch.empty(8, dtype=torch.bfloat16, device="meta", requires_grad=True)] if rule.sinks else []
    out = packed_attention(*leaves, documents, rule, *sinks)
    out.sum().backward()
    assert (out.shape, out.dtype) == ((60, 8, 64), torch.bfloat16)
    assert all(x.grad is not None and x.grad.shape == x.shape for x in (*leaves, *sinks))


def test_a_soft_cap_is_refused() -> None:
    documents = PackedDocuments.of_rows([[28]], 30, kernel=varlen_kernel("varlen")).moved(on_meta)
    with pytest.raises(RayppError, match="no soft cap"):
        packed_attention(heads(30, 8), heads(30, 2), heads(30, 2), documents, AttentionRule(soft_cap=1.0))


@pytest.mark.parametrize("rank", range(2))
def test_every_hop_of_a_ring_and_its_gradients_are_one_call(rank: int) -> None:
    blocks = varlen_kernel("varlen").blocks
    assert blocks is not None
    hops = FlashHops(hop_segments(plan_ring([5, 91, 40, 56], 96, rank, 2)), blocks).moved(on_meta)
    q, kv = heads(96, 8).detach(), torch.stack((heads(96, 2), heads(96, 2))).detach()
    out, dq = (torch.empty(96, 8, 64, device="meta") for _ in range(2))
    lse, dkv = torch.empty(96, 8, device="meta"), torch.empty(2, 96, 2, 64, device="meta")
    assert hops.count == 2
    for hop in range(hops.count):
        hops.attend(hop, q, kv, out, lse)
        hops.add_gradients(hop, q, q, kv, q, lse, dq, dkv)
    assert (dq.dtype, dkv.dtype) == (torch.float32, torch.float32)


@pytest.mark.parametrize(("name", "module"), [("flash3", "flash_attn_interface"), ("flash4", "flash_attn")])
def test_flash_attention_that_is_not_installed_leaves_torchs_kernels_in_place(name: str, module: str) -> None:
    with pytest.raises(ImportError, match=module):
        varlen_kernel(name)
    assert current_flash_attention_impl() is None


def test_documents_by_cudnn_are_one_call_with_as_many_heads_and_rounded_bounds() -> None:
    """torch's operator takes these arguments, which a CPU computes here by the plain version."""
    seen: list[tuple[int, int, int]] = []

    def documents_of(cu: Tensor) -> PackedDocuments:
        return PackedDocuments.of_lengths([n for n in cu.diff().tolist() if n])

    def forward(q: Tensor, k: Tensor, v: Tensor, bias: Any, cu: Tensor, cu_keys: Tensor, *more: Any, scale: Any) -> Any:
        seen.append((len(cu) - 1, more[0], k.shape[1]))
        assert bias is None and more[2:] == (True, 0.0, True)  # without what is the default
        out = packed_attention(q, k, v, documents_of(cu), AttentionRule(scale=scale))
        none = q.new_empty(0)
        return out, q.new_ones(1), none, none, *more[:2], none + 1, none + 2, none

    def backward(*given: Any, scale: Any) -> Any:
        grad, q, k, v, _, lse, _, _, bias, _cu, cu_keys, queries, keys, dropout, causal = given
        assert (bias, queries, keys, dropout, causal) == (None, seen[0][1], seen[0][1], 0.0, True) and lse.item() == 1
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]

        def gradients() -> tuple[Tensor, ...]:
            out = packed_attention(*leaves, documents_of(cu_keys), AttentionRule(scale=scale))
            return torch.autograd.grad(out, leaves, grad)

        with ThreadPoolExecutor(1) as thread:  # an operator runs below autograd, a new thread does not
            return thread.submit(gradients).result()

    library = torch.library.Library("aten", "IMPL", "CPU")
    library.impl("_cudnn_attention_forward", forward, "CPU")
    library.impl("_cudnn_attention_backward", backward, "CPU")
    found = []
    for kernel in (CUDNN, None):
        torch.manual_seed(0)
        leaves = [torch.randn(60, count, 16, requires_grad=True) for count in (8, 2, 2)]
        documents = PackedDocuments.of_lengths((5, 20, 3, 31, 1), kernel=kernel)
        out = packed_attention(*leaves, documents, AttentionRule(scale=0.1))
        found.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    del library
    assert seen == [(8, 32, 8)]
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)
    with pytest.raises(RayppError, match="no windows"):
        packed_attention(*leaves, PackedDocuments.of_lengths((60,), kernel=CUDNN), AttentionRule(window=3))
