"""Collates a replica's rows into padded tensors and document borders.

Legend: B rows of a microbatch, T its agreed length in tokens, t this rank's share of T.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raypp.data.packing import Row
from raypp.models.documents import PackedDocuments
from raypp.parallel.context import ContextShare

IGNORED = -100


@dataclass(frozen=True, eq=False)
class StageBatch:
    """One microbatch as a stage sees it: this rank's share of every row.

    Attributes:
        tokens_BT: Token ids, int64 `[B, t]`; padding is 0.
        labels_BT: Next-token ids, int64 `[B, t]`; -100 if a token has no label.
        positions_BT: Position of each token in its document, int64 `[B, t]`.
        documents: The borders of the documents, in whole rows.
    """

    tokens_BT: Tensor
    labels_BT: Tensor
    positions_BT: Tensor
    documents: PackedDocuments

    def stage_arguments(self) -> dict[str, Any]:
        """Returns the keyword arguments of every stage's forward in training, `[B, t]` tensors."""
        return {
            "positions_BT": self.positions_BT,
            "documents": self.documents,
            "labelled_BT": self.labels_BT != IGNORED,
        }


def longest_row(rows: Sequence[Row]) -> int:
    """Returns the number of tokens in the longest row of a microbatch."""
    return max(len(row.tokens) for row in rows)


def labelled_tokens(rows: Sequence[Row]) -> int:
    """Returns the number of tokens of a microbatch that have a label."""
    return sum(int((row.labels != IGNORED).sum()) for row in rows)


def rows_digest(rows: Sequence[Row]) -> int:
    """Returns the CRC-32 of all tokens; ranks that read the same rows get the same number."""
    digest = 0
    for row in rows:
        digest = zlib.crc32(row.tokens.astype(np.int64).tobytes(), digest)
    return digest


def collate(rows: Sequence[Row], length: int, device: torch.device, share: ContextShare) -> StageBatch:
    """Pads the rows of one microbatch to the agreed length and takes this rank's share of each.

    Args:
        rows: B rows.
        length: T, in tokens; no row is longer.
        device: The device of the returned tensors.
        share: This rank's share of the tokens. Labels and positions are computed for the whole row
            and cut like its tokens.

    Returns:
        Tensors `[B, t]` on `device`.
    """
    tokens = np.zeros((len(rows), length), dtype=np.int64)
    labels = np.full((len(rows), length), IGNORED, dtype=np.int64)
    positions = np.zeros((len(rows), length), dtype=np.int64)
    for index, row in enumerate(rows):
        tokens[index, : len(row.tokens)] = row.tokens
        labels[index, : len(row.labels)] = row.labels
        start = 0
        for count in row.documents[:-1]:
            positions[index, start : start + count] = np.arange(count)
            start += count
        positions[index, start:] = np.arange(length - start)  # the last document includes the padding
    columns = share.columns(length)
    return StageBatch(
        tokens_BT=torch.from_numpy(tokens[:, columns]).to(device),
        labels_BT=torch.from_numpy(labels[:, columns]).to(device),
        positions_BT=torch.from_numpy(positions[:, columns]).to(device),
        documents=share.documents([row.documents for row in rows], length, device),
    )
