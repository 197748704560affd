"""Collates a replica's rows into padded tensors and document borders, and moves them.

Legend: B rows of a microbatch, T its agreed length in tokens, t this rank's share of T.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raypp.crc32 import crc32
from raypp.rank.data.packing import Row
from raypp.stages.models.adapter_dropout import StepKeys
from raypp.stages.models.attention import PLAIN, AttentionKernel
from raypp.stages.models.documents import Move, PackedDocuments
from raypp.stages.models.loss import IGNORED
from raypp.stages.parallel.context import ContextShare

ALIGNMENT = 16
"""Each tensor of a joint copy begins at a multiple of this many bytes, as kernels expect."""


@dataclass(frozen=True, eq=False)
class StageBatch:
    """One microbatch as a stage sees it: this rank's share of every row. `tokens_BT`: token ids,
    int64 `[B, t]`; padding is 0. `labels_BT`: next-token ids, int64 `[B, t]`; -100 if a token has
    no label. `positions_BT`: position of each token in its document, int64 `[B, t]`. `documents`:
    the borders of the documents, in whole rows."""

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

    def moved(self, move: Move) -> StageBatch:
        """Returns the same batch with all tensors moved, always in the same order."""
        tokens, labels, positions = (move(t) for t in (self.tokens_BT, self.labels_BT, self.positions_BT))
        return replace(
            self, tokens_BT=tokens, labels_BT=labels, positions_BT=positions, documents=self.documents.moved(move)
        )


def longest_row(rows: Sequence[Row]) -> int:
    """Returns the number of tokens in the longest row of a microbatch."""
    return max(len(row.tokens) for row in rows)


def labelled_tokens(rows: Sequence[Row]) -> int:
    """Returns the number of tokens of a microbatch that have a label."""
    return sum(int((row.labels != IGNORED).sum()) for row in rows)


def rows_digest(rows: Sequence[Row]) -> int:
    """Returns the CRC-32 of all tokens and labels; the same on ranks that read the same rows."""
    digest = 0
    for row in rows:
        digest = crc32(row.tokens.astype(np.int64).tobytes(), digest)
        digest = crc32(row.labels.astype(np.int64).tobytes(), digest)
    return digest


def collate(
    rows: Sequence[Row],
    length: int,
    share: ContextShare,
    kernel: AttentionKernel = PLAIN,
    keys: StepKeys | None = None,
    first_row: int = 0,
) -> StageBatch:
    """Pads the rows of one microbatch to the agreed length and takes this rank's share of each.
    `length`: T, in tokens; no row is longer. `share`: this rank's share of the tokens. Labels and
    positions are computed for the whole row and cut like its tokens. `keys`: the keys of the step's
    tokens. None: nothing is dropped. `first_row`: number of the first row, counted through the
    replica's rows of the step. Returns tensors `[B, t]` on the host, t of the T tokens. `on_device`
    moves those of a step."""
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
    documents = share.documents([row.documents for row in rows], length, kernel)
    if keys is not None:
        documents = replace(documents, keys_S=keys.of(first_row, len(rows), columns))
    return StageBatch(
        tokens_BT=torch.from_numpy(tokens[:, columns]),
        labels_BT=torch.from_numpy(labels[:, columns]),
        positions_BT=torch.from_numpy(positions[:, columns]),
        documents=documents,
    )


def on_device(batches: Sequence[StageBatch], device: torch.device) -> list[StageBatch]:
    """Moves a step's batches to the device in one copy without waiting; on CPUs, returns them."""
    if device.type == "cpu":
        return list(batches)
    tensors: list[Tensor] = []

    def collect(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    for batch in batches:
        batch.moved(collect)
    arrived = iter(copied_together(tensors, device))
    return [batch.moved(lambda _: next(arrived)) for batch in batches]


def copied_together(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copies host tensors `[...]` of any dtype to the device as one piece of pinned memory. The
    copies are views of one tensor, so its memory is free when all of them are."""
    starts, size = [], 0
    for tensor in tensors:
        starts.append(size)
        size += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    # torch's allocator of pinned memory keeps this memory until the copy is done.
    packed = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")

    def view(of: Tensor, start: int, like: Tensor) -> Tensor:
        return of[start : start + like.nbytes].view(like.dtype).view(like.shape)

    for tensor, start in zip(tensors, starts, strict=True):
        view(packed, start, tensor).copy_(tensor)
    moved = packed.to(device, non_blocking=True)
    return [view(moved, start, tensor) for tensor, start in zip(tensors, starts, strict=True)]
