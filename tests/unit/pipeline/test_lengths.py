"""The padded lengths of microbatches, and the tensors a stage gets."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.distributed import ProcessGroup

from raypp.rank.data.packing import Row
from raypp.rank.step.collate import collate, labelled_tokens, rows_digest
from raypp.stages.parallel.context import Ring, RingShare, UlyssesShare, WholeRows
from raypp.stages.pipeline.agreement import padded_length


def row(*documents: int, first: int = 1) -> Row:
    tokens = np.arange(first, first + sum(documents), dtype=np.int64)
    return Row(tokens=tokens, labels=np.where(tokens % 5 == 0, -100, tokens + 1), documents=documents)


@pytest.mark.parametrize(
    ("tokens", "cp", "multiple", "expected"),
    [(8000, 1, 128, 8064), (96000, 4, 128, 96256), (5000, 2, 64, 5120), (1001, 2, 8, 1008)],
)
def test_lengths_are_padded_to_a_multiple_on_every_cp_rank(tokens: int, cp: int, multiple: int, expected: int) -> None:
    assert padded_length(tokens, parts=cp, multiple=multiple) == expected


def test_a_bucket_rounds_up_before_the_multiple() -> None:
    assert padded_length(130, multiple=8, bucket=100) == 200


def test_rows_are_padded_with_positions_that_restart_at_every_document() -> None:
    batch = collate([row(3, 2), row(4)], 8, WholeRows())
    assert batch.tokens_BT.tolist() == [[1, 2, 3, 4, 5, 0, 0, 0], [1, 2, 3, 4, 0, 0, 0, 0]]
    assert batch.positions_BT.tolist() == [[0, 1, 2, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6, 7]]
    assert batch.labels_BT.tolist()[0] == [2, 3, 4, 5, -100, -100, -100, -100]
    assert batch.documents.lengths == (3, 5, 8)


def test_cp_ranks_share_out_every_row_with_the_positions_and_labels_of_the_whole() -> None:
    rows = [row(3, 2), row(4, 4)]
    whole = collate(rows, 8, WholeRows())
    one, other = (collate(rows, 8, ring_share(rank, 2)) for rank in range(2))
    assert one.positions_BT.tolist() == [[0, 1, 3, 4], [0, 1, 2, 3]]  # first and last quarter of each row
    assert other.positions_BT.tolist() == [[2, 0, 1, 2], [2, 3, 0, 1]]
    for name in ("tokens_BT", "labels_BT", "positions_BT"):
        shared = torch.cat((getattr(one, name), getattr(other, name)), 1)
        assert shared.sort(1).values.equal(getattr(whole, name).sort(1).values)
    assert one.documents.lengths == whole.documents.lengths
    assert one.documents.across is not None and whole.documents.across is None


def ring_share(rank: int, size: int) -> RingShare:
    group = ProcessGroup(rank, size)  # nothing is sent
    return RingShare(Ring(rank, size, group, group))


def test_parts_of_ulysses_are_contiguous() -> None:
    parts = [UlyssesShare(rank, ProcessGroup(rank, 3)).columns(12).tolist() for rank in range(3)]
    assert parts == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


def test_labels_are_counted_without_the_ignored() -> None:
    assert labelled_tokens([row(3, 2), row(4)]) == 8


def test_the_digest_distinguishes_rows() -> None:
    assert rows_digest([row(3), row(4)]) == rows_digest([row(3), row(4)])
    assert rows_digest([row(3), row(4)]) != rows_digest([row(3), row(4, first=2)])
    masked = replace(row(4), labels=np.full(4, -100))
    assert rows_digest([row(3), row(4)]) != rows_digest([row(3), masked])
