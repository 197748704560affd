"""Attention by torch's FlexAttention: one compiled kernel with a mask of documents.

CUDA only: on CPU FlexAttention has no backward. It takes dtypes, head widths and cards that the
variable-length kernels refuse.

Legend: S tokens of a microbatch, H query heads, K key/value heads, D head width, N blocks of
`BLOCK` tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from raypp.models.attention_kernel import AttentionKernel
from raypp.models.documents import PackedDocuments

BLOCK = 128
"""Tokens of a side of the mask's blocks."""

_masks: WeakKeyDictionary[PackedDocuments, BlockMask] = WeakKeyDictionary()


@cache
def flex_kernel() -> AttentionKernel:
    """Returns the kernel `flex`. It is compiled at its first call, once for all lengths."""
    return AttentionKernel("flex", partial(attend, run=torch.compile(flex_attention, dynamic=True)))


def attend(q_SHD: Tensor, k_SKD: Tensor, v_SKD: Tensor, documents: PackedDocuments, run: Callable[..., Any]) -> Tensor:
    """Computes attention within documents: `[S, H, D]`, `[S, K, D]`, `[S, K, D]` to `[S, H, D]`.

    `run` is `flex_attention`, or its compiled version.
    """
    mask = _masks.get(documents)
    if mask is None:
        mask = _masks[documents] = document_mask(documents)
    q, k, v = (x.transpose(0, 1)[None] for x in (q_SHD, k_SKD, v_SKD))
    out: Tensor = run(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
    return out[0].transpose(0, 1)


def document_mask(documents: PackedDocuments) -> BlockMask:
    """Returns the mask of causal attention within documents, on the device of `cu_seqlens`.

    It never looks at all pairs of tokens, and does not wait for the device. Documents are in
    ascending order, so the first and the last document of each block decide.
    """
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

    return BlockMask.from_kv_blocks(
        *_listed(seen & ~whole), *_listed(whole), BLOCK, same_document, seq_lengths=(tokens, tokens)
    )


def _listed(chosen_NN: Tensor) -> tuple[Tensor, Tensor]:
    """Returns how many blocks of each row are chosen, and their indices: `[1, 1, N(, N)]`."""
    order = chosen_NN.int().argsort(dim=-1, descending=True, stable=True)
    return chosen_NN.sum(-1, dtype=torch.int32)[None, None], order.int()[None, None]
