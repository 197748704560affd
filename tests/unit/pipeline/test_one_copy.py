"""The tensors of a step go to the device in one copy, without a change."""

from typing import Any

import torch
from test_lengths import ring_share, row
from torch import Tensor

from raypp.rank.step.collate import ALIGNMENT, StageBatch, collate, copied_together, on_device
from raypp.stages.models.attention import AttentionKernel, Segments
from raypp.stages.models.documents import PackedDocuments

CPU, META = torch.device("cpu"), torch.device("meta")


class NoBlocks:
    """Blocks of a kernel that is never called."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segments: Segments
    ) -> tuple[Tensor, Tensor, Tensor]:
        raise NotImplementedError


def attend(q: Tensor, k: Tensor, v: Tensor, documents: PackedDocuments, rule: Any, sinks: Any) -> Tensor:
    raise NotImplementedError


def batches() -> list[StageBatch]:
    kernel = AttentionKernel("none", attend, NoBlocks())
    return [collate([row(3, 2), row(7, 4)], 12, ring_share(rank, 2), kernel) for rank in range(2)]


def tensors_of(batch: StageBatch) -> list[Tensor]:
    found: list[Tensor] = []

    def collect(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    batch.moved(collect)
    return found


def test_the_copies_have_the_values_and_are_parts_of_one_tensor() -> None:
    before = [torch.arange(5, dtype=torch.int32), torch.randn(3, 2).T, torch.tensor([True, False]), torch.arange(4)]
    after = copied_together(before, CPU)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(after, before, strict=True))
    assert len({tensor.untyped_storage().data_ptr() for tensor in after}) == 1
    assert all(tensor.storage_offset() * tensor.itemsize % ALIGNMENT == 0 for tensor in after)


def test_no_tensor_of_a_step_stays_on_the_host() -> None:
    host = batches()
    moved = on_device(host, META)
    for before, after in zip(host, moved, strict=True):
        arrived = tensors_of(after)
        assert len(arrived) == 3 + 2 + 2 * 2  # tokens, labels, positions; borders, lengths; two hops of the ring
        assert [(t.shape, t.dtype) for t in arrived] == [(t.shape, t.dtype) for t in tensors_of(before)]
        assert all(tensor.device == META for tensor in arrived)


def test_a_cpu_keeps_the_tensors_it_has() -> None:
    host = batches()
    assert all(one is other for one, other in zip(on_device(host, CPU), host, strict=True))
