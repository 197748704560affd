"""Ring attention: the tokens of a row that each rank holds, and the score blocks it computes.

A row of T tokens is cut into 2 · size equal chunks; rank r holds chunks r and 2 · size - 1 - r, so
that causal work is balanced. Documents lie end to end: a later chunk's queries and an earlier
chunk's keys are a full rectangle, only a chunk with itself is causal, and chunks without a common
document need no block. A window leaves out or narrows rectangles.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby


def zigzag(rank: int, size: int) -> tuple[int, int]:
    """Returns the two chunks of a row that a rank holds, ascending."""
    return rank, 2 * size - 1 - rank


@dataclass(frozen=True)
class Block:
    """A part of the score matrix: some queries of this rank against some keys of one rank.

    Attributes:
        queries: Slice of this rank's tokens (rows end to end, the two chunks of each row in order).
        keys: Slice of the tokens of the rank that holds the keys, in the same order.
        causal: True: queries and keys are the same tokens, and each query sees the keys up to
            itself. False: every query sees every key.
        window: A query sees only this many tokens, itself included. None: no limit here.
        offset: Position of the first query minus that of the first key, where there is a window.
    """

    queries: slice
    keys: slice
    causal: bool
    window: int | None = None
    offset: int | None = None


@dataclass(frozen=True)
class RingPlan:
    """The blocks that a rank computes in one microbatch. In hop h, the keys belong to rank `rank -
    h`, modulo the size. In hop 0, the causal blocks come before any rectangle. `hops`: the largest
    number of hops that any rank of the ring needs, at least 1. The same on all ranks."""

    blocks: tuple[tuple[Block, ...], ...]
    hops: int


def plan_ring(lengths: Sequence[int], row_len: int, rank: int, size: int, window: int | None = None) -> RingPlan:
    """Plans the blocks of a rank. `lengths`: lengths of all documents in tokens, rows end to end.
    No document crosses the end of a row. `row_len`: T, a multiple of 2 · size. `window`: the tokens
    that a query sees, itself included. None: no limit."""
    if row_len % (2 * size):
        raise ValueError(f"rows of {row_len} tokens cannot be cut into {2 * size} equal chunks")
    width = row_len // (2 * size)
    owner_of = {chunk: (owner, slot) for owner in range(size) for slot, chunk in enumerate(zigzag(owner, size))}
    hops = 1
    by_hop: list[list[Block]] = [[] for _ in range(size)]
    for row, start, end in _documents(lengths, row_len):
        touched = range(start // width, (end - 1) // width + 1)

        def local(chunk: int, tokens: range, row: int = row) -> slice:
            base = (2 * row + owner_of[chunk][1] - chunk) * width
            return slice(base + tokens.start, base + tokens.stop)

        of_document: list[list[Block]] = [[] for _ in range(size)]
        for queries in touched:
            for keys in range(touched.start, queries + 1):
                asking, asked = (
                    range(max(start, chunk * width), min(end, (chunk + 1) * width)) for chunk in (queries, keys)
                )
                if window is not None:
                    asking, asked = _within(asking, asked, window)
                if not asking:
                    continue
                hop = (owner_of[queries][0] - owner_of[keys][0]) % size
                hops = max(hops, hop + 1)
                if owner_of[queries][0] == rank:
                    spans = local(queries, asking), local(keys, asked)
                    cut = window is not None and asking.stop - 1 - asked.start >= window
                    limit = (window, asking.start - asked.start) if cut else ()
                    of_document[hop].append(Block(*spans, queries == keys, *limit))
        for hop, blocks in enumerate(of_document):
            by_hop[hop].extend(_joined(blocks))
    ordered = tuple(tuple(sorted(blocks, key=lambda block: not block.causal)) for blocks in by_hop)
    return RingPlan(ordered, hops)


def _within(queries: range, keys: range, window: int) -> tuple[range, range]:
    """Returns the positions of queries and keys, none of them later, that see each other. Both
    ranges are empty if none do."""
    queries = range(queries.start, min(queries.stop, keys.stop - 1 + window))
    keys = range(max(keys.start, queries.start - window + 1), keys.stop)
    return queries, keys if queries else range(0)


def _documents(lengths: Sequence[int], row_len: int) -> Iterator[tuple[int, int, int]]:
    """Yields (row, start, end) for every document; start and end are positions in its row."""
    at = 0
    for length in lengths:
        row, start = divmod(at, row_len)
        yield row, start, start + length
        at += length


def _joined(blocks: list[Block]) -> list[Block]:
    """Merges adjacent rectangles into one where they form a rectangle: fewer, larger products."""
    causal = [block for block in blocks if block.causal or block.window is not None]
    full = [block for block in blocks if not block.causal and block.window is None]
    wide = []
    for _, same_queries in groupby(full, key=lambda block: (block.queries.start, block.queries.stop)):
        group = list(same_queries)
        wide += [Block(group[0].queries, keys, False) for keys in joined_spans([block.keys for block in group])]
    wide.sort(key=lambda block: (block.keys.start, block.keys.stop, block.queries.start))
    for _, same_keys in groupby(wide, key=lambda block: (block.keys.start, block.keys.stop)):
        group = list(same_keys)
        causal += [Block(queries, group[0].keys, False) for queries in joined_spans([block.queries for block in group])]
    return causal


def joined_spans(slices: Iterable[slice]) -> list[slice]:
    """Merges slices that follow each other directly."""
    spans: list[slice] = []
    for each in slices:
        if spans and each.start == spans[-1].stop:
            spans[-1] = slice(spans[-1].start, each.stop)
        else:
            spans.append(each)
    return spans
