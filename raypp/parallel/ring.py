"""Ring attention: every rank keeps its queries, keys and values travel from rank to rank.

In hop h a rank works on the keys of the rank h places to its left, while those of the next hop arrive. In the
backward the keys go round again, and their gradients follow one step behind, each rank adding its share, until they
are sent home (Ring Attention, arXiv:2310.01889). Sums over blocks are kept in fp32. Grouped keys and values travel
as they are; they are repeated for the query heads only where they are used.

Legend: S this rank's tokens of a microbatch, H query heads, K key/value heads, D head width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from raypp.parallel.attention_blocks import attend_block, block_gradients
from raypp.parallel.zigzag import Block, RingPlan


@dataclass(frozen=True)
class Ring:
    """The ranks that share a sequence.

    Attributes:
        rank: This one's place, of `size`.
        size: How many there are.
        up: Carries messages to higher ranks.
        down: The same ranks, for messages to lower ones: a pair never uses one group in both directions at once,
            which gloo would serialise and where unpaired operations of NCCL would wait for each other.
    """

    rank: int
    size: int
    up: dist.ProcessGroup
    down: dist.ProcessGroup

    def exchange(self, tensor: Tensor, distance: int) -> tuple[Tensor, list[dist.Work]]:
        """Starts sending `tensor` `distance` places to the right and receiving what comes from as far on the left.

        Returns:
            Where it arrives, and what to wait for; `tensor` must stay alive and unchanged until then.
        """
        to, source = (self.rank + distance) % self.size, (self.rank - distance) % self.size
        arriving = torch.empty_like(tensor)
        works: list[dist.Work | None] = []
        # Upward messages before downward ones and receiving before sending: then no rank waits in a circle, also where
        # a first message blocks until its peer is there, as NCCL does while it connects the two.
        for upward, group in ((True, self.up), (False, self.down)):
            if (source < self.rank) is upward:
                works.append(dist.irecv(arriving, group=group, group_src=source))
            if (to > self.rank) is upward:
                works.append(dist.isend(tensor, group=group, group_dst=to))
        return arriving, [work for work in works if work is not None]

    def travelling(self, own: Tensor, hops: int) -> Iterator[Tensor]:
        """`own`, then what each rank further to the left has; the next arrives while the caller works on one."""
        current = own
        for hop in range(hops):
            if hop + 1 == hops:
                yield current
                return
            arriving, works = self.exchange(current, 1)
            yield current
            _finish(works)
            current = arriving


def ring_attention(q_SHD: Tensor, k_SKD: Tensor, v_SKD: Tensor, ring: Ring, plan: RingPlan) -> Tensor:
    """Causal attention within documents over the whole row, of which this rank holds its two chunks.

    Collective over the ring, forward and backward.

    Args:
        q_SHD: This rank's queries, rotary positions applied; so are the keys.
        k_SKD: Its keys.
        v_SKD: Its values.
        ring: The ranks.
        plan: This rank's blocks of this microbatch.

    Returns:
        `[S, H, D]`.
    """
    out: Tensor = _RingAttention.apply(q_SHD, k_SKD, v_SKD, ring, plan)  # type: ignore[no-untyped-call]
    return out


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: Ring, plan: RingPlan) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        out_SHD = torch.empty(q.shape, dtype=wide, device=q.device)
        lse_SH = torch.empty(q.shape[:2], dtype=wide, device=q.device)
        for blocks, (k_hop, v_hop) in zip(plan.blocks, ring.travelling(torch.stack((k, v)), plan.hops), strict=False):
            for block in blocks:
                out, lse = attend_block(q[block.queries], k_hop[block.keys], v_hop[block.keys], causal=block.causal)
                _add(out_SHD, lse_SH, block, out, lse)
        result = out_SHD.to(q.dtype)
        ctx.ring, ctx.plan = ring, plan
        ctx.save_for_backward(q, k, v, result, lse_SH)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, out, lse = ctx.saved_tensors
        ring, plan = ctx.ring, ctx.plan
        dq = torch.zeros(q.shape, dtype=lse.dtype, device=q.device)
        coming: tuple[Tensor, list[dist.Work]] | None = None
        sent = dkv = torch.empty(0)
        for hop, kv in enumerate(ring.travelling(torch.stack((k, v)), plan.hops)):
            dkv = torch.zeros(kv.shape, dtype=lse.dtype, device=q.device)
            for block in plan.blocks[hop]:
                at = block.queries
                k_block, v_block = kv[:, block.keys]
                shares = block_gradients(grad[at], q[at], k_block, v_block, out[at], lse[at], causal=block.causal)
                for total, share in zip((dq[at], dkv[0, block.keys], dkv[1, block.keys]), shares, strict=True):
                    total += share
            if coming is not None:
                arrived, works = coming
                _finish(works)
                dkv += arrived
            if hop + 1 < plan.hops:
                sent = dkv  # kept until it has left
                coming = ring.exchange(sent, 1)
        if plan.hops > 1:
            dkv, works = ring.exchange(dkv, 1 - plan.hops)
            _finish(works)
        del sent
        return dq.to(q.dtype), dkv[0].to(k.dtype), dkv[1].to(v.dtype), None, None


def _add(out_SHD: Tensor, lse_SH: Tensor, block: Block, out: Tensor, lse: Tensor) -> None:
    """Adds a block to what its queries have seen so far; their own causal block is the first of all."""
    so_far, lse_so_far = out_SHD[block.queries], lse_SH[block.queries]
    if block.causal:
        so_far.copy_(out)
        lse_so_far.copy_(lse)
        return
    both = torch.logaddexp(lse_so_far, lse)
    so_far.mul_((lse_so_far - both).exp()[..., None]).add_(out * (lse - both).exp()[..., None])
    lse_so_far.copy_(both)


def _finish(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()
