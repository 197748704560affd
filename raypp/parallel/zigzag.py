"""Which rank holds which tokens of a row under ring attention, and which blocks of the score matrix it computes.

Every row of T tokens is cut into 2 · size equal chunks; rank r holds chunks r and 2 · size - 1 - r, in this order.
A causal row's work grows along the row, so that a chunk from the front and one from the back balance each other.

Documents lie end to end. So a document that reaches from one chunk into a later one fills everything between them,
and the block of a later chunk's queries and an earlier chunk's keys is a full rectangle, without any mask: only the
blocks of a chunk with itself are causal. What no document spans is no block at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

Layout = Callable[[int, int], tuple[int, int]]
"""(rank, size) -> the two chunks of a row that the rank holds, ascending."""


def zigzag(rank: int, size: int) -> tuple[int, int]:
    """The layout of ring attention."""
    return rank, 2 * size - 1 - rank


def contiguous(rank: int, size: int) -> tuple[int, int]:
    """Two neighbouring chunks: what a plain cut would give. Kept to measure what the zig-zag is worth."""
    return 2 * rank, 2 * rank + 1


@dataclass(frozen=True)
class Block:
    """Part of the score matrix: some of this rank's queries against some of a rank's keys.

    Attributes:
        queries: Of this rank's tokens (rows end to end, each row's two chunks in order).
        keys: Of the keys' holder's tokens, counted alike.
        causal: As many queries as keys, of the same tokens, each seeing those up to itself. Otherwise all see all.
    """

    queries: slice
    keys: slice
    causal: bool

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that it sees."""
        queries = int(self.queries.stop - self.queries.start)
        keys = int(self.keys.stop - self.keys.start)
        return queries * (queries + 1) // 2 if self.causal else queries * keys


@dataclass(frozen=True)
class RingPlan:
    """What a rank does in one microbatch.

    Attributes:
        blocks: Per hop; in hop h the keys are those of rank `rank - h`, modulo the size. Hop 0 holds every token's
            own causal block, before any rectangle.
        hops: Hops that any rank of the ring needs, at least 1; the same on all of them.
    """

    blocks: tuple[tuple[Block, ...], ...]
    hops: int


def plan_ring(lengths: Sequence[int], row_len: int, rank: int, size: int, layout: Layout = zigzag) -> RingPlan:
    """The blocks of a rank.

    Args:
        lengths: Of all documents, in tokens, rows end to end; none crosses the end of a row.
        row_len: T, a multiple of 2 · size.
        rank: In the ring.
        size: Of the ring.
        layout: Who holds what.
    """
    if row_len % (2 * size):
        raise ValueError(f"rows of {row_len} tokens cannot be cut into {2 * size} equal chunks")
    width = row_len // (2 * size)
    place = {chunk: (owner, slot) for owner in range(size) for slot, chunk in enumerate(layout(owner, size))}
    hops = 1
    by_hop: list[list[Block]] = [[] for _ in range(size)]
    for row, start, end in _documents(lengths, row_len):
        touched = range(start // width, (end - 1) // width + 1)

        def local(chunk: int, row: int = row, start: int = start, end: int = end) -> slice:
            base = (2 * row + place[chunk][1]) * width
            first, last = max(start - chunk * width, 0), min(end - chunk * width, width)
            return slice(base + first, base + last)

        found: list[list[Block]] = [[] for _ in range(size)]
        for queries in touched:
            for keys in range(touched.start, queries + 1):
                hop = (place[queries][0] - place[keys][0]) % size
                hops = max(hops, hop + 1)
                if place[queries][0] == rank:
                    found[hop].append(Block(local(queries), local(keys), causal=queries == keys))
        for hop, blocks in enumerate(found):
            by_hop[hop].extend(_joined(blocks))
    ordered = tuple(tuple(sorted(blocks, key=lambda block: not block.causal)) for blocks in by_hop)
    return RingPlan(ordered, hops)


def _documents(lengths: Sequence[int], row_len: int) -> Iterator[tuple[int, int, int]]:
    """(row, start, end) of every document, positions in its row."""
    at = 0
    for length in lengths:
        row, start = divmod(at, row_len)
        yield row, start, start + length
        at += length


def _joined(blocks: list[Block]) -> list[Block]:
    """Rectangles that together are one rectangle become one: fewer and larger multiplications."""
    causal = [block for block in blocks if block.causal]
    full = [block for block in blocks if not block.causal]
    wide = []
    for _, same_queries in groupby(full, key=lambda block: (block.queries.start, block.queries.stop)):
        group = list(same_queries)
        wide += [Block(group[0].queries, keys, False) for keys in _spans([block.keys for block in group])]
    wide.sort(key=lambda block: (block.keys.start, block.keys.stop, block.queries.start))
    for _, same_keys in groupby(wide, key=lambda block: (block.keys.start, block.keys.stop)):
        group = list(same_keys)
        causal += [Block(queries, group[0].keys, False) for queries in _spans([block.queries for block in group])]
    return causal


def _spans(slices: list[slice]) -> list[slice]:
    """Ascending slices, neighbours made one."""
    spans = [slices[0]]
    for each in slices[1:]:
        if each.start == spans[-1].stop:
            spans[-1] = slice(spans[-1].start, each.stop)
        else:
            spans.append(each)
    return spans
