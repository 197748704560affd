"""Attention by torch's FlexAttention: one compiled kernel with a mask of documents.

CUDA only: on CPU FlexAttention has no backward. It takes dtypes, head widths and cards that the
variable-length kernels refuse.

Legend: S tokens of a microbatch, H query heads, K key/value heads, D head width, N blocks of
`BLOCK` tokens.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from raypp.job.layer_rules import AttentionRule
from raypp.stages.models.attention import AttentionKernel
from raypp.stages.models.documents import PackedDocuments

BLOCK = 128
"""Tokens of a side of the mask's blocks."""

_masks: WeakKeyDictionary[PackedDocuments, dict[int | None, BlockMask]] = WeakKeyDictionary()
"""The masks of a microbatch by window."""


@cache
def flex_kernel() -> AttentionKernel:
    """Returns the kernel `flex`. It is compiled at its first call, once for all lengths."""
    return AttentionKernel("flex", partial(attend, run=torch.compile(flex_attention, dynamic=True)))


def attend(
    q_SHD: Tensor,
    k_SKD: Tensor,
    v_SKD: Tensor,
    documents: PackedDocuments,
    rule: AttentionRule,
    sinks_H: Tensor | None,
    run: Callable[..., Any],
) -> Tensor:
    """Computes attention within documents: `[S, H, D]`, `[S, K, D]`, `[S, K, D]` to `[S, H, D]`.
    `run` is `flex_attention`, or its compiled version."""
    masks = _masks.setdefault(documents, {})
    if rule.window not in masks:
        masks[rule.window] = document_mask(documents, rule.window)
    q, k, v = (x.transpose(0, 1)[None] for x in (q_SHD, k_SKD, v_SKD))
    options: dict[str, Any] = {"block_mask": masks[rule.window], "enable_gqa": q.shape[1] != k.shape[1]}
    if rule.scale is not None:
        options["scale"] = rule.scale
    if rule.soft_cap is not None:
        options["score_mod"] = _capped(rule.soft_cap)
    if sinks_H is None:
        out: Tensor = run(q, k, v, **options)
        return out[0].transpose(0, 1)
    out, aux = run(q, k, v, **options, return_aux=AuxRequest(lse=True))
    shares_HS = torch.sigmoid(aux.lse[0] - sinks_H[:, None])
    return (out[0] * shares_HS[..., None].to(out.dtype)).transpose(0, 1)


@cache
def _capped(cap: float) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Returns FlexAttention's `score_mod`, which caps one score `[]`. The same function for the
    same cap, so that it is compiled once."""

    def capped(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return torch.tanh(score / cap) * cap

    return capped


def document_mask(documents: PackedDocuments, window: int | None = None) -> BlockMask:
    """Returns the mask of causal attention within documents, on the device of `cu_seqlens`. With a
    window, a query sees that many tokens, itself included. It never looks at all pairs of tokens,
    and does not wait for the device. Documents are in ascending order, so the first and the last
    document of each block decide."""
    cu, tokens = documents.cu_seqlens, sum(documents.lengths)
    blocks = -(-tokens // BLOCK)
    positions = torch.arange(blocks * BLOCK, device=cu.device).clamp_(max=tokens - 1)
    document_S = torch.searchsorted(cu[1:], positions, right=True, out_int32=True)
    first, last = document_S.view(blocks, BLOCK)[:, 0], document_S.view(blocks, BLOCK)[:, -1]
    index = torch.arange(blocks, device=cu.device)
    seen = (index[:, None] >= index) & (last >= first[:, None])
    whole = (index[:, None] > index) & (first == last[:, None])
    if tokens % BLOCK:
        whole[-1] = False  # the last block has rows beyond the tokens

    def same_document(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (document_S[query] == document_S[key])

    reach = tokens if window is None else window

    def near(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return same_document(batch, head, query, key) & (query - key < reach)

    if window is not None:
        nearest = (index[:, None] - index) * BLOCK - (BLOCK - 1)
        seen &= nearest < window
        whole &= nearest + 2 * (BLOCK - 1) < window
    mask = same_document if window is None else near
    return BlockMask.from_kv_blocks(*_listed(seen & ~whole), *_listed(whole), BLOCK, mask, seq_lengths=(tokens, tokens))


def _listed(chosen_NN: Tensor) -> tuple[Tensor, Tensor]:
    """Returns, of bool `[N, N]`, how many blocks of each row are chosen, and their indices. They
    are int32 `[1, 1, N]` and `[1, 1, N, N]`."""
    order = chosen_NN.int().argsort(dim=-1, descending=True, stable=True)
    return chosen_NN.sum(-1, dtype=torch.int32)[None, None], order.int()[None, None]
