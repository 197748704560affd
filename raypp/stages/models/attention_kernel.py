"""What a kernel of packed attention must offer. The plain version is the reference for all.

Legend: S tokens of a microbatch, Q queries, N keys, H query heads, K key/value heads (K divides H),
D head width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from raypp.job.layer_rules import AttentionRule
    from raypp.stages.models.documents import PackedDocuments


@dataclass(frozen=True, eq=False)
class Segments:
    """Which queries see which keys: segment i of the queries sees segment i of the keys.

    Attributes:
        cu_queries: Where the segments of queries begin, int32 `[segments + 1]`, from 0 to Q.
        cu_keys: Where the segments of keys begin, int32 `[segments + 1]`, from 0 to N.
        longest_queries: At least the length of the longest segment of queries, on the host.
        longest_keys: The same for keys.
        causal: True: a query sees the keys up to itself, and both sides have the same segments.
            False: it sees all keys of its segment.
        window: A query sees this many keys, itself included; only where `causal`. None: no limit.
        scale: Factor of the scores. None: head width ** -0.5.
    """

    cu_queries: Tensor
    cu_keys: Tensor
    longest_queries: int
    longest_keys: int
    causal: bool
    window: int | None = None
    scale: float | None = None


class FlashBlocks(Protocol):
    """Variable-length attention by parts: each part with the values needed to combine them. A
    part's output and log-sum-exp (lse) are over the keys given. Given the output and the lse over
    *all* parts, the gradients of each part are computed separately and added."""

    def forward(self, q_QHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
        """Returns the output `[Q, H, D]` and the lse `[H, Q]`, fp32 or the output's if wider."""

    def backward(
        self,
        grad_QHD: Tensor,
        q_QHD: Tensor,
        k_NKD: Tensor,
        v_NKD: Tensor,
        out_QHD: Tensor,
        lse_HQ: Tensor,
        segments: Segments,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the gradients of queries `[Q, H, D]`, keys and values `[N, K, D]`."""


@dataclass(frozen=True)
class AttentionKernel:
    """One way to compute attention within the documents of a microbatch. `attend`: computes it for
    whole rows: `[S, H, D]`, `[S, K, D]`, `[S, K, D]` to `[S, H, D]`, under the layer's rule, with
    the scores `[H]` of its sinks if it has them. `blocks`: the same kernel by parts, for ring
    attention. None: ring attention uses `parallel.ring_hops.BlockHops`."""

    name: str
    attend: Callable[[Tensor, Tensor, Tensor, PackedDocuments, AttentionRule, Tensor | None], Tensor]
    blocks: FlashBlocks | None = None
