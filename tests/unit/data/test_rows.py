from itertools import pairwise

import numpy as np
import pytest
from data_jobs import corpus_of, job, loading
from hypothesis import given, settings
from hypothesis import strategies as st

from raypp.rank.data.packing import NO_LABEL, RowPlan, make_row

LENGTHS = st.lists(st.integers(1, 70), min_size=1, max_size=60)
SHAPES = st.tuples(st.booleans(), st.booleans(), st.integers(2, 32), st.integers(1, 20))


@settings(deadline=None)
@given(lengths=LENGTHS, shape=SHAPES, epoch=st.integers(0, 3))
def test_every_token_of_an_epoch_is_in_exactly_one_row(
    lengths: list[int], shape: tuple[bool, bool, int, int], epoch: int
) -> None:
    packing, shuffle, seq_len, block = shape
    corpus = corpus_of(lengths)
    plan = RowPlan(corpus, seq_len, packing, shuffle, 0, block=block)
    rows = [make_row(corpus, pieces) for index in range(plan.blocks) for pieces in plan.block(epoch, index)]
    assert sorted(np.concatenate([row.tokens for row in rows]).tolist()) == list(range(sum(lengths)))
    for row in rows:
        assert row.tokens.dtype == row.labels.dtype == np.int64
        assert sum(row.documents) == len(row.tokens) == len(row.labels) <= seq_len
        assert packing or len(row.documents) == 1


@settings(deadline=None)
@given(lengths=LENGTHS, shape=SHAPES)
def test_a_label_is_the_next_token_of_the_same_document(lengths: list[int], shape: tuple[bool, bool, int, int]) -> None:
    packing, shuffle, seq_len, block = shape
    corpus = corpus_of(lengths)  # consecutive ids: the next token is one more, and a document's last id is known
    last_ids = set((np.cumsum(lengths) - 1).tolist())
    plan = RowPlan(corpus, seq_len, packing, shuffle, 5, block=block)
    for index in range(plan.blocks):
        for pieces in plan.block(0, index):
            row = make_row(corpus, pieces)
            expected = [NO_LABEL if token in last_ids else token + 1 for token in row.tokens.tolist()]
            assert row.labels.tolist() == expected
            at = 0
            for length in row.documents:
                piece = row.tokens[at : at + length].tolist()
                assert all(after == before + 1 for before, after in pairwise(piece))
                assert not last_ids & set(piece[:-1])
                at += length


@settings(deadline=None)
@given(lengths=LENGTHS, seq_len=st.integers(2, 32), packing=st.booleans())
def test_without_shuffle_tokens_come_in_their_order(lengths: list[int], seq_len: int, packing: bool) -> None:
    corpus = corpus_of(lengths)
    plan = RowPlan(corpus, seq_len, packing, False, 0, block=7)
    rows = [make_row(corpus, pieces) for index in range(plan.blocks) for pieces in plan.block(0, index)]
    assert np.concatenate([row.tokens for row in rows]).tolist() == list(range(sum(lengths)))


@settings(max_examples=20, deadline=None)
@given(lengths=LENGTHS)
def test_epochs_and_seeds_have_orders_of_their_own(lengths: list[int]) -> None:
    lengths = lengths + list(range(1, 30))
    plans = [RowPlan(corpus_of(lengths), 16, True, True, seed) for seed in (0, 1)]
    assert plans[0].block(0, 0) != plans[0].block(1, 0)
    assert plans[0].block(0, 0) != plans[1].block(0, 0)
    assert plans[0].block(2, 0) == plans[0].block(2, 0)


def test_a_chosen_part_of_a_corpus_gives_rows_of_those_documents_only() -> None:
    part = corpus_of([3, 4, 5, 6]).select(np.array([1, 3]))
    plan = RowPlan(part, 4, True, True, 0)
    ids = [make_row(part, pieces).tokens.tolist() for pieces in plan.block(0, 0)]
    assert sorted(i for row in ids for i in row) == [*range(3, 7), *range(12, 18)]


def test_a_document_of_a_huge_length_is_spread_over_blocks_of_bounded_size() -> None:
    plan = RowPlan(corpus_of([10_000]), 8, True, True, 0, block=100)
    assert plan.blocks == 13
    assert max(len(plan.block(0, index)) for index in range(plan.blocks)) <= 100


@pytest.mark.parametrize("seq_len", [256, 512])
def test_real_verses_fill_their_rows(seq_len: int) -> None:
    with loading(job(kind="text", path="jobs/data/kjv-new-testament.txt", seq_len=seq_len)) as loader:
        plan = loader._order.once()
    blocks = [plan.block(epoch, i) for epoch in (0, 1) for i in range(plan.blocks)]
    filled = [sum(piece.length for row in rows for piece in row) / (len(rows) * seq_len) for rows in blocks]
    assert min(filled) > 0.98
