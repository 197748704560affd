"""Ring attention: which rank holds which tokens; each pair of tokens is computed exactly once."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypp.stages.parallel.zigzag import RingPlan, plan_ring, zigzag


def columns(rank: int, size: int, row_len: int, rows: int) -> np.ndarray:
    """Returns the global index (rows end to end) of each token of a rank."""
    chunks = np.arange(rows * row_len).reshape(rows, 2 * size, -1)
    return chunks[:, list(zigzag(rank, size))].reshape(-1)


def seen(plans: Sequence[RingPlan], row_len: int, rows: int) -> np.ndarray:
    """Counts how often each query sees each key, over all ranks: `[tokens, tokens]`."""
    size = len(plans)
    counts = np.zeros((rows * row_len,) * 2, dtype=np.int64)
    for rank, plan in enumerate(plans):
        own = columns(rank, size, row_len, rows)
        for hop, blocks in enumerate(plan.blocks):
            other = columns((rank - hop) % size, size, row_len, rows)
            for block in blocks:
                queries, keys = own[block.queries], other[block.keys]
                sight = np.tri(len(queries), dtype=np.int64) if block.causal else np.ones((len(queries), len(keys)))
                if block.window is not None:
                    assert block.offset == queries[0] - keys[0]
                    sight = sight * (queries[:, None] - keys < block.window)
                assert sight.any(1).all()
                counts[np.ix_(queries, keys)] += sight.astype(np.int64)
    return counts


def wanted(lengths: Sequence[int]) -> np.ndarray:
    document = np.repeat(np.arange(len(lengths)), lengths)
    return (document[:, None] == document) & np.tri(len(document), dtype=bool)


@st.composite
def packed_rows(draw: st.DrawFn) -> tuple[int, int, int, list[int]]:
    """Draws (ring size, row length, rows, lengths of documents)."""
    size, rows = draw(st.integers(1, 5)), draw(st.integers(1, 2))
    row_len = 2 * size * draw(st.integers(1, 5))
    lengths: list[int] = []
    for _ in range(rows):
        inner = st.integers(1, row_len - 1)
        cuts = draw(st.lists(inner, unique=True, max_size=6)) if row_len > 1 else []
        lengths += np.diff([0, *sorted(cuts), row_len]).tolist()
    return size, row_len, rows, lengths


@given(packed_rows())
@settings(max_examples=60, deadline=None)
def test_every_query_sees_every_key_of_its_past_in_its_document_once(case: tuple[int, int, int, list[int]]) -> None:
    size, row_len, rows, lengths = case
    plans = [plan_ring(lengths, row_len, rank, size) for rank in range(size)]
    assert np.array_equal(seen(plans, row_len, rows), wanted(lengths))
    assert len({plan.hops for plan in plans}) == 1
    assert not any(blocks for plan in plans for blocks in plan.blocks[plan.hops :])


@given(packed_rows(), st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_with_a_window_it_sees_only_the_last_of_them(case: tuple[int, int, int, list[int]], window: int) -> None:
    size, row_len, rows, lengths = case
    plans = [plan_ring(lengths, row_len, rank, size, window=window) for rank in range(size)]
    near = np.arange(row_len * rows)[:, None] - np.arange(row_len * rows) < window
    assert np.array_equal(seen(plans, row_len, rows), wanted(lengths) & near)
    assert len({plan.hops for plan in plans}) == 1
    assert plans[0].hops <= plan_ring(lengths, row_len, 0, size).hops


def test_a_row_of_one_document_is_shared_out_evenly() -> None:
    plans = [plan_ring([64], 64, rank, 4) for rank in range(4)]
    counts = seen(plans, 64, 1)
    assert {int(counts[columns(rank, 4, 64, 1)].sum()) for rank in range(4)} == {65 * 64 // 2 // 4}


def test_every_hop_is_one_rectangle_per_document() -> None:
    plan = plan_ring([64], 64, 1, 4)
    assert [len(blocks) for blocks in plan.blocks] == [3, 1, 1, 1]
    assert plan.hops == 4


def test_keys_do_not_travel_when_no_document_crosses_a_border() -> None:
    assert plan_ring([8] * 8, 64, 0, 4).hops == 1


def test_a_row_that_cannot_be_cut_evenly_is_refused() -> None:
    with pytest.raises(ValueError, match="6 equal chunks"):
        plan_ring([16], 16, 0, 3)
