"""Context parallelism: each rank of a cp group computes on a share of every row.

All ranks of the group read the same rows. All layers except attention treat each token separately.
Attention reaches the tokens of other ranks through `PackedDocuments.across`.

Legend: S tokens on this rank, B rows, T tokens of a padded row, R ranks of the cp group, c parts of
a row on a rank, P pieces on this rank, H heads, D width of a key, V of a value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from raypp.job.layer_rules import NO_RULE, AttentionRule
from raypp.stages.models.attention import PLAIN, AttentionKernel, packed_attention
from raypp.stages.models.attention_products import reaching_sinks, with_sinks
from raypp.stages.models.documents import Move, PackedDocuments
from raypp.stages.models.recomputed import attention
from raypp.stages.parallel.expert import all_to_all
from raypp.stages.parallel.ring_hops import BlockHops, FlashHops, RingHops, hop_segments
from raypp.stages.parallel.zigzag import RingPlan, plan_ring, zigzag


@dataclass(frozen=True)
class WholeRows:
    """No context parallelism: the rank holds whole rows."""

    size = 1
    """R. A padded row is cut into R equal parts."""

    def columns(self, length: int) -> NDArray[np.int64]:
        """Returns the indices of this rank's tokens in a padded row, int64 `[length / R]`. They are
        in the order in which the rank holds them. `length` is T."""
        return np.arange(length)

    def documents(self, rows: Sequence[Sequence[int]], length: int, kernel: AttentionKernel = PLAIN) -> PackedDocuments:
        """Returns the documents of whole rows padded to `length`, with attention across the ranks;
        tensors on the host. `rows`: the document lengths of each of the B rows, in tokens."""
        return PackedDocuments.of_rows(rows, length, kernel=kernel)


@dataclass(frozen=True)
class _RingAcross:
    """Ring attention of one microbatch. `lengths`: lengths of all documents of whole rows. `hops`:
    of layers without window and soft cap. `plans`: by window, made when first needed."""

    ring: Ring
    lengths: Sequence[int]
    row_len: int
    hops: RingHops
    plans: dict[int | None, RingPlan] = field(default_factory=dict)

    def __call__(
        self, q_SHD: Tensor, k_SKD: Tensor, v_SKD: Tensor, rule: AttentionRule, sinks_H: Tensor | None
    ) -> Tensor:
        return ring_attention(q_SHD, k_SKD, v_SKD, self.ring, self._hops(rule.within(max(self.lengths))), sinks_H)

    def states(self) -> StatesOverRanks:
        size = self.ring.size
        held = [zigzag(rank, size) for rank in range(size)]
        return StatesOverRanks(self.lengths, self.row_len, held, self.ring.up)

    def _hops(self, rule: AttentionRule) -> RingHops:
        """Returns the hops of a layer. No flash kernel has soft caps, or windows between chunks."""
        if rule.window is None and rule.soft_cap is None and isinstance(self.hops, FlashHops):
            return replace(self.hops, scale=rule.scale)
        if rule.window not in self.plans:
            rank, size = self.ring.rank, self.ring.size
            self.plans[rule.window] = plan_ring(self.lengths, self.row_len, rank, size, window=rule.window)
        return BlockHops(self.plans[rule.window], rule)

    def moved(self, move: Move) -> _RingAcross:
        return replace(self, hops=self.hops.moved(move))


@dataclass(frozen=True)
class RingShare:
    """Ring attention: a rank holds a chunk from the front of each row and one from its back."""

    ring: Ring

    @property
    def size(self) -> int:
        return self.ring.size

    def columns(self, length: int) -> NDArray[np.int64]:
        chunks = np.arange(length).reshape(2 * self.size, -1)
        return chunks[list(zigzag(self.ring.rank, self.size))].reshape(-1)

    def documents(self, rows: Sequence[Sequence[int]], length: int, kernel: AttentionKernel = PLAIN) -> PackedDocuments:
        whole = PackedDocuments.of_rows(rows, length, kernel=kernel)
        plan = plan_ring(whole.lengths, length, self.ring.rank, self.size)
        blocks = kernel.blocks
        hops = BlockHops(plan) if blocks is None else FlashHops(hop_segments(plan), blocks)
        across = _RingAcross(self.ring, whole.lengths, length, hops, {None: plan})
        return whole.reaching(across, self.columns(length), len(rows))


@dataclass(frozen=True)
class _UlyssesAcross:
    """Ulysses attention of one microbatch of `rows` rows."""

    rows: int
    group: dist.ProcessGroup
    whole: PackedDocuments

    def __call__(
        self, q_SHD: Tensor, k_SKD: Tensor, v_SKD: Tensor, rule: AttentionRule, sinks_H: Tensor | None
    ) -> Tensor:
        return ulysses_attention(q_SHD, k_SKD, v_SKD, self.rows, self.group, self.whole, rule, sinks_H)

    def states(self) -> StatesOverRanks:
        lengths = self.whole.lengths
        held = [[rank] for rank in range(self.group.size())]
        return StatesOverRanks(lengths, sum(lengths) // self.rows, held, self.group)

    def moved(self, move: Move) -> _UlyssesAcross:
        return replace(self, whole=self.whole.moved(move))


@dataclass(frozen=True)
class UlyssesShare:
    """Ulysses attention: a rank holds part `rank` of the R contiguous parts of every row."""

    rank: int
    group: dist.ProcessGroup

    @property
    def size(self) -> int:
        return self.group.size()

    def columns(self, length: int) -> NDArray[np.int64]:
        part = length // self.size
        return np.arange(self.rank * part, (self.rank + 1) * part)

    def documents(self, rows: Sequence[Sequence[int]], length: int, kernel: AttentionKernel = PLAIN) -> PackedDocuments:
        whole = PackedDocuments.of_rows(rows, length, kernel=kernel)
        across = _UlyssesAcross(len(rows), self.group, whole)
        return whole.reaching(across, self.columns(length), len(rows))


# Ring attention: every rank keeps its queries; keys and values travel from rank to rank.
#
# In hop h, a rank works on the keys of the rank h places to its left, while the next ones arrive.
# In the backward they travel again, their gradients follow one hop behind, and the last rank sends
# them home (arXiv:2310.01889). Sums over hops are in fp32. `ring_hops` has what a rank computes in
# a hop.
#
# Legend: H query heads, K key/value heads, D head width.


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
        """Yields `own` `[...]`, then the tensors of the ranks further to the left: `hops` in all.
        The next one arrives while the caller works. Collective over the ring."""
        current = own
        for hop in range(hops):
            if hop + 1 == hops:
                yield current
                return
            arriving, works = self.exchange(current, 1)
            yield current
            _wait(works)
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
                _wait(works)
                dkv += arrived
            if hop + 1 < hops.count:
                sent = dkv  # keep it alive until it is sent
                coming = ring.exchange(sent, 1)
        if hops.count > 1:
            dkv, works = ring.exchange(dkv, 1 - hops.count)
            _wait(works)
        del sent
        return dq.to(q.dtype), dkv[0].to(k.dtype), dkv[1].to(v.dtype), None, None, None


def _wait(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()


# Ulysses attention: exchanges tokens for heads before attention, and heads for tokens after it.
#
# In between, each rank has whole rows for its share of the heads, so any attention can be used
# (DeepSpeed-Ulysses, arXiv:2309.14509). If R does not divide K, each key/value head is sent to all
# ranks whose queries need it. Autograd sums the gradients that come back.
#
# Legend: t = T / R tokens of a row on this rank, H query heads, K key/value heads, D head width.


ContextShare = WholeRows | RingShare | UlyssesShare
"""The tokens of every row that a rank computes on, and how its attention reaches the others."""


def ulysses_attention(
    q_SHD: Tensor,
    k_SKD: Tensor,
    v_SKD: Tensor,
    rows: int,
    group: dist.ProcessGroup,
    whole: PackedDocuments,
    rule: AttentionRule = NO_RULE,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Computes causal attention within documents over whole rows; this rank holds a part of each.
    Collective over the group, in the forward and in the backward. `q_SHD`: this rank's queries
    `[B·t, H, D]`, rotary encoding applied. R divides H. `sinks_H`: the scores of the sinks of all
    heads, `[H]`. None: there are none. Returns the output `[B·t, H, D]`."""
    ranks = group.size()
    copies = math.lcm(k_SKD.shape[1], ranks) // k_SKD.shape[1]
    if copies > 1:
        k_SKD, v_SKD = k_SKD.repeat_interleave(copies, 1), v_SKD.repeat_interleave(copies, 1)
    heads = [x.shape[1] // ranks for x in (q_SHD, k_SKD, v_SKD)]
    # One exchange for all three: [R, B·t, heads of a rank, D], ordered by receiving rank.
    per_rank = [x.reshape(len(x), ranks, -1, x.shape[-1]) for x in (q_SHD, k_SKD, v_SKD)]
    gathered = torch.cat(per_rank, dim=2).transpose(0, 1)
    theirs = all_to_all(gathered, group)
    row_wise = theirs.view(ranks, rows, -1, *theirs.shape[2:]).transpose(0, 1).flatten(0, 2)
    q, k, v = torch.split(row_wise, heads, dim=1)
    if sinks_H is not None:
        sinks_H = sinks_H.chunk(ranks)[group.rank()]
    out = packed_attention(q, k, v, whole, rule, sinks_H)
    by_rank = out.reshape(rows, ranks, -1, *out.shape[1:]).transpose(0, 1)
    back = all_to_all(by_rank.flatten(1, 2), group)
    return back.transpose(0, 1).flatten(1, 2)


@dataclass(frozen=True)
class StatesOverRanks:
    """States of the delta rule of one microbatch (`models.documents.StatesAcross`). Each rank
    reduces what it holds of a row to how it changes a state. All ranks get that of all, and the
    last tokens for the convolution: messages whose size does not depend on the length of rows.
    `documents`: lengths of all documents of whole rows. `row_len`: tokens of a row. `held`: the
    numbers of the parts of a row that each rank holds, in its order."""

    documents: Sequence[int]
    row_len: int
    held: Sequence[Sequence[int]]
    group: dist.ProcessGroup

    @property
    def _part(self) -> int:
        return self.row_len // sum(map(len, self.held))

    @cached_property
    def _borders(self) -> list[int]:
        """Where documents begin, in the rows end to end, and where the last one ends."""
        borders = [0]
        for length in self.documents:
            borders.append(borders[-1] + length)
        return borders

    def _cut(self, row: int, part: int) -> list[int]:
        """Returns the lengths of the pieces of a part of a row."""
        first = row * self.row_len + part * self._part
        inside = [border for border in self._borders if first < border < first + self._part]
        ends = [first, *inside, first + self._part]
        return [end - begin for begin, end in pairwise(ends)]

    def _behind(self, row: int, part: int) -> int:
        """Returns how many tokens of its first document are before a part of a row."""
        first = row * self.row_len + part * self._part
        return first - max(border for border in self._borders if border <= first)

    def _mine(self) -> Iterator[tuple[int, int]]:
        """Yields row and part of what this rank holds, in its order."""
        for row in range(self._borders[-1] // self.row_len):
            yield from ((row, part) for part in self.held[self.group.rank()])

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        return tuple(length for row, part in self._mine() for length in self._cut(row, part))

    def before(self, x_SC: Tensor, count: int) -> Tensor:
        """Returns the tokens before each piece, `[P, count, C]`. Collective, also its backward."""
        tails = x_SC.view(-1, self._part, x_SC.shape[1])[:, -count:]
        of_part, zeros = self._gathered(tails)
        found = []
        for row, part in self._mine():
            known = min(self._behind(row, part), count)
            first = zeros
            if known:
                first = torch.cat((zeros[: count - known], of_part(row, part - 1)[count - known :]))
            found += [first, *[zeros] * (len(self._cut(row, part)) - 1)]
        return torch.stack(found)

    def starts(self, summary: Callable[[], Tensor]) -> Tensor:
        """Returns the states before pieces, `[P, H, D, V]`. Collective, also its backward."""
        changes = summary()
        sizes = [len(self._cut(row, part)) for row, part in self._mine()]
        last = torch.stack([pieces[-1] for pieces in torch.split(changes, sizes)])
        of_part, zeros = self._gathered(last)
        width = changes.shape[-1] - changes.shape[-2]
        zero, found = zeros[..., :width], []
        for row, part in self._mine():
            # The document of the part's first token begins in the part `first`.
            state, first = zero, part - -(-self._behind(row, part) // self._part)
            for earlier in range(first, part):
                own, kept = of_part(row, earlier).tensor_split([width], dim=-1)
                state = own if earlier == first else kept @ state + own
            found += [state, *[zero] * (len(self._cut(row, part)) - 1)]
        return torch.stack(found)

    def _gathered(self, mine: Tensor) -> tuple[Callable[[int, int], Tensor], Tensor]:
        """Gathers values of all parts, of this rank's `[B · c, ...]`. Returns a function that gives
        that of a row and part, and zeros of its shape. The zeros depend on the gathered values as
        autograd sees it: the backward of every rank must come here."""
        ranks = len(self.held)
        copies = mine.expand(ranks, *mine.shape).flatten(0, 1)
        theirs = all_to_all(copies, self.group).view(ranks, -1, len(self.held[0]), *mine.shape[1:])
        place = {part: (rank, at) for rank, parts in enumerate(self.held) for at, part in enumerate(parts)}

        def of_part(row: int, part: int) -> Tensor:
            rank, at = place[part]
            return theirs[rank, row, at]

        return of_part, torch.zeros_like(theirs[0, 0, 0]) + theirs.flatten()[:0].sum()

    def ended(self, states: Tensor) -> None:
        """Does nothing: the other ranks have their states from the summaries."""
