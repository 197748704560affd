"""The hops of ring attention as segments: each pair of tokens is computed exactly once."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from test_zigzag import columns, packed_rows, wanted

from raypp.stages.parallel.ring_hops import HopSegments, hop_segments
from raypp.stages.parallel.zigzag import Block, RingPlan, plan_ring


def pairs_seen(hop: HopSegments, own: np.ndarray, other: np.ndarray, tokens: int) -> np.ndarray:
    """Counts how often each query sees each key in a hop, as a kernel reads the hop's segments."""
    counts = np.zeros((tokens, tokens), dtype=np.int64)
    queries = np.concatenate([own[span] for span in hop.queries])
    keys = np.concatenate([other[span] for span in hop.keys])
    bounds = [list(pairwise(cu.tolist())) for cu in (hop.segments.cu_queries, hop.segments.cu_keys)]
    assert bounds[0][-1][1] == len(queries) and bounds[1][-1][1] == len(keys)
    assert hop.segments.longest_queries == max(end - start for start, end in bounds[0])
    assert hop.segments.longest_keys == max(end - start for start, end in bounds[1])
    for (first, last), (start, end) in zip(*bounds, strict=True):
        shape = (last - first, end - start)
        sight = np.tri(*shape, dtype=np.int64) if hop.segments.causal else np.ones(shape, dtype=np.int64)
        counts[np.ix_(queries[first:last], keys[start:end])] += sight
    return counts


@given(packed_rows())
@settings(max_examples=60, deadline=None)
def test_every_query_sees_every_key_of_its_past_in_its_document_once(case: tuple[int, int, int, list[int]]) -> None:
    size, row_len, rows, lengths = case
    counts = np.zeros((rows * row_len,) * 2, dtype=np.int64)
    for rank in range(size):
        plan = plan_ring(lengths, row_len, rank, size)
        hops = hop_segments(plan)
        assert len(hops) == plan.hops
        assert hops[0].queries == (slice(0, rows * row_len // size),)  # so hop 0 sets every output
        for index, hop in enumerate(hops):
            if hop.queries:
                own, other = (columns(r % size, size, row_len, rows) for r in (rank, rank - index))
                counts += pairs_seen(hop, own, other, rows * row_len)
    assert np.array_equal(counts, wanted(lengths))


def test_a_later_hop_has_one_segment_per_row_at_most() -> None:
    hops = hop_segments(plan_ring([64, 40, 24], 64, 1, 4))
    assert [len(hop.segments.cu_queries) - 1 for hop in hops] == [3, 2, 1, 2]


def test_a_plan_of_another_layout_is_refused() -> None:
    apart = RingPlan(((Block(slice(0, 2), slice(0, 2), True), Block(slice(4, 6), slice(4, 6), True),
                       Block(slice(4, 6), slice(0, 2), False)),), 1)  # fmt: skip
    with pytest.raises(ValueError, match="next to"):
        hop_segments(apart)
