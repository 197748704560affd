"""Ring attention: every rank keeps its queries; keys and values travel from rank to rank.

In hop h, a rank works on the keys of the rank h places to its left, while the next ones arrive. In
the backward they travel again, their gradients follow one hop behind, and the last rank sends them
home (arXiv:2310.01889). Sums over hops are in fp32. `ring_hops` has what a rank computes in a hop.

Legend: S this rank's tokens of a microbatch, H query heads, K key/value heads, D head width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from raypp.stages.models.attention_products import reaching_sinks, with_sinks
from raypp.stages.models.recomputed import attention
from raypp.stages.parallel.ring_hops import RingHops


@dataclass(frozen=True)
class Ring:
    """The ranks that share a sequence. `up`: the process group for messages to higher ranks.
    `down`: the same ranks, for messages to lower ranks. Two ranks never use one group in both
    directions at once: gloo would serialise the directions, and with NCCL, unpaired operations
    would wait for each other."""

    rank: int
    size: int
    up: dist.ProcessGroup
    down: dist.ProcessGroup

    def exchange(self, tensor: Tensor, distance: int) -> tuple[Tensor, list[dist.Work]]:
        """Starts sending `tensor` `distance` places to the right. Also starts receiving from the
        rank as far to the left. Collective over the ring. The tensor `[...]` has the same shape on
        all ranks. Returns the receive buffer, of the shape of `tensor`, and the work to wait for.
        `tensor` must stay alive and unchanged until that work is done."""
        to, source = (self.rank + distance) % self.size, (self.rank - distance) % self.size
        arriving = torch.empty_like(tensor)
        works: list[dist.Work | None] = []
        # Post upward messages before downward ones, and receives before sends. This order cannot
        # deadlock, even where the first message blocks until its peer arrives, as NCCL's does while
        # it connects them.
        for upward, group in ((True, self.up), (False, self.down)):
            if (source < self.rank) is upward:
                works.append(dist.irecv(arriving, group=group, group_src=source))
            if (to > self.rank) is upward:
                works.append(dist.isend(tensor, group=group, group_dst=to))
        return arriving, [work for work in works if work is not None]

    def travelling(self, own: Tensor, hops: int) -> Iterator[Tensor]:
        """Yields `own`, then the tensors of the ranks further to the left: `hops` in all. All have
        the shape `[...]` of `own`. The next tensor arrives while the caller works on the current
        one. Collective over the ring."""
        current = own
        for hop in range(hops):
            if hop + 1 == hops:
                yield current
                return
            arriving, works = self.exchange(current, 1)
            yield current
            _finish(works)
            current = arriving


def ring_attention(
    q_SHD: Tensor, k_SKD: Tensor, v_SKD: Tensor, ring: Ring, hops: RingHops, sinks_H: Tensor | None = None
) -> Tensor:
    """Computes causal attention within documents over whole rows. This rank holds two chunks of
    each row. Collective over the ring, in the forward and in the backward. `sinks_H`: the scores of
    the sinks, `[H]`. None: there are none. Returns the output `[S, H, D]`."""
    apply: Any = _RingAttention.apply
    out, lse = attention(lambda q, k, v: apply(q, k, v, ring, hops, sinks_H), q_SHD, k_SKD, v_SKD)
    return reaching_sinks(out, lse, sinks_H)


class _RingAttention(torch.autograd.Function):
    """`ring_attention` with its own backward, which does not reach the sinks."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: Ring, hops: RingHops, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Attends to the keys of each hop: q `[S, H, D]`, k, v `[S, K, D]`. Returns output
        `[S, H, D]` and lse `[S, H]`. The lse has no gradient."""
        wide = torch.promote_types(q.dtype, torch.float32)
        out_SHD = torch.empty(q.shape, dtype=wide, device=q.device)
        lse_SH = torch.empty(q.shape[:2], dtype=wide, device=q.device)
        for hop, kv in enumerate(ring.travelling(torch.stack((k, v)), hops.count)):
            hops.attend(hop, q, kv, out_SHD, lse_SH)
        if sinks is not None:
            out_SHD, lse_SH = with_sinks(out_SHD, lse_SH, sinks)
        result = out_SHD.to(q.dtype)
        ctx.ring, ctx.hops = ring, hops
        ctx.save_for_backward(q, k, v, result, lse_SH)
        ctx.mark_non_differentiable(lse_SH)
        return result, lse_SH

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        """Returns the gradients of q `[S, H, D]`, k and v `[S, K, D]`, given that of the output."""
        q, k, v, out, lse = ctx.saved_tensors
        ring, hops = ctx.ring, ctx.hops
        dq = torch.zeros(q.shape, dtype=lse.dtype, device=q.device)
        coming: tuple[Tensor, list[dist.Work]] | None = None
        sent = dkv = torch.empty(0)
        for hop, kv in enumerate(ring.travelling(torch.stack((k, v)), hops.count)):
            dkv = torch.zeros(kv.shape, dtype=lse.dtype, device=q.device)
            hops.add_gradients(hop, grad, q, kv, out, lse, dq, dkv)
            if coming is not None:
                arrived, works = coming
                _finish(works)
                dkv += arrived
            if hop + 1 < hops.count:
                sent = dkv  # keep it alive until it is sent
                coming = ring.exchange(sent, 1)
        if hops.count > 1:
            dkv, works = ring.exchange(dkv, 1 - hops.count)
            _finish(works)
        del sent
        return dq.to(q.dtype), dkv[0].to(k.dtype), dkv[1].to(v.dtype), None, None, None


def _finish(works: list[dist.Work]) -> None:
    """Waits for all of them."""
    for work in works:
        work.wait()
