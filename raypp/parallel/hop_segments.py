"""The hops of ring attention as segments for a variable-length kernel: one call per hop.

In hop 0, the pieces of a document that a rank holds lie end to end, so the hop is causal attention
over them. In every other hop, each rectangle is one segment without a mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from raypp.models.attention_kernel import Segments
from raypp.models.documents import Move
from raypp.parallel.zigzag import Block, RingPlan


@dataclass(frozen=True)
class HopSegments:
    """The segments of one hop.

    Attributes:
        queries: Spans of this rank's tokens that hold the queries; empty if the hop has none.
        keys: Spans of the tokens of the keys' rank that hold the keys.
        segments: How the tokens of the spans, end to end, are divided.
    """

    queries: tuple[slice, ...]
    keys: tuple[slice, ...]
    segments: Segments

    def moved(self, move: Move) -> HopSegments:
        """Returns the same with its tensors moved."""
        cu_queries, cu_keys = move(self.segments.cu_queries), move(self.segments.cu_keys)
        return replace(self, segments=replace(self.segments, cu_queries=cu_queries, cu_keys=cu_keys))


def hop_segments(plan: RingPlan) -> tuple[HopSegments, ...]:
    """Returns the segments of each of the plan's hops, on the host.

    The plan must be that of the zigzag layout.
    """
    own = _documents(plan.blocks[0])
    first = _hop(own, own, causal=True)
    return first, *(_later(plan.blocks[hop]) for hop in range(1, plan.hops))


def _later(blocks: Sequence[Block]) -> HopSegments:
    """Returns a hop whose blocks are all rectangles."""
    return _hop([block.queries for block in blocks], [block.keys for block in blocks], causal=False)


def _documents(blocks: Sequence[Block]) -> list[slice]:
    """Joins the blocks of hop 0 to the documents, in ascending order.

    A document in both chunks of a row has a causal block in each and the rectangle between them.
    """
    continues = {block.queries.start: block.keys for block in blocks if not block.causal}
    spans: list[slice] = []
    for span in sorted((block.queries for block in blocks if block.causal), key=lambda span: int(span.start)):
        before = continues.pop(span.start, None)
        if before is None:
            spans.append(span)
        elif spans and (before.start, before.stop) == (spans[-1].start, span.start):
            spans[-1] = slice(before.start, span.stop)
        else:
            raise ValueError(f"the keys {before} do not lie next to the queries {span}")
    if continues:
        raise ValueError(f"rectangles of hop 0 without a causal block: queries from {sorted(continues)}")
    return spans


def _hop(queries: Sequence[slice], keys: Sequence[slice], *, causal: bool) -> HopSegments:
    """Returns the hop whose segment i is `queries[i]` against `keys[i]`."""
    cu_queries, cu_keys = _cumulative(queries), _cumulative(keys)
    segments = Segments(
        torch.tensor(cu_queries, dtype=torch.int32),
        torch.tensor(cu_keys, dtype=torch.int32),
        max(map(_size, queries), default=0),
        max(map(_size, keys), default=0),
        causal,
    )
    return HopSegments(_merged(queries), _merged(keys), segments)


def _size(span: slice) -> int:
    return int(span.stop - span.start)


def _cumulative(spans: Sequence[slice]) -> list[int]:
    return [0, *accumulate(map(_size, spans))]


def _merged(spans: Sequence[slice]) -> tuple[slice, ...]:
    """Merges spans that follow each other directly."""
    merged: list[slice] = []
    for span in spans:
        if merged and merged[-1].stop == span.start:
            merged[-1] = slice(merged[-1].start, span.stop)
        else:
            merged.append(span)
    return tuple(merged)
