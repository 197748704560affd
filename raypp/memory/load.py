"""From a snapshot in memory back into the same rank's modules and optimizer: one copy, no network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from raypp.checkpoint.dtypes import DTYPES
from raypp.checkpoint.load import fill_optimizer
from raypp.checkpoint.state import OPTIMIZER, Slice, model_slices, optimizer_slices
from raypp.checkpoint.tensor_file import TensorEntry
from raypp.memory.slot import Slot, decode_tail


class PreparedLoad:
    """A verified snapshot that fits this rank's stages; `apply` puts it in place.

    Everything that can go wrong goes wrong here, before anything is changed.

    Args:
        slot: Verified (`Slot.verify`); must stay open until `apply` returns.
        control: Its control block.
        stages: This rank's stages.
        optimizer: Over their parameters.

    Raises:
        ValueError: The snapshot is not of these stages; the tensor is named.
    """

    def __init__(
        self, slot: Slot, control: Mapping[str, Any], stages: Sequence[nn.Module], optimizer: torch.optim.Optimizer
    ) -> None:
        tail = slot.tail(control)
        if tail is None:
            raise ValueError("its tail is corrupt")
        entries, self.extra = decode_tail(tail)
        self._stages, self._optimizer = stages, optimizer
        self._data = slot.memory(control["data_size"])
        by_name = {entry.name: entry for entry in entries}
        saved = {name: (e.global_shape, DTYPES[e.dtype]) for name, e in by_name.items() if name.startswith(OPTIMIZER)}
        targets = model_slices(stages)
        more, self._entries = optimizer_slices(stages, optimizer, saved)
        targets.update(more)
        self._python = {name: entry.python for name, entry in by_name.items() if entry.python}
        self._pairs: list[tuple[Tensor, TensorEntry]] = []
        for name, slices in targets.items():
            for target in slices:
                if target.tensor.numel():
                    self._pairs.append((target.tensor, _matching(target, by_name.get(name))))

    @torch.no_grad()
    def apply(self) -> None:
        """Replaces weights and optimizer state."""
        for target, entry in self._pairs:
            target.copy_(self._data[entry.begin : entry.end].view(DTYPES[entry.dtype]).view(entry.shape))
        fill_optimizer(self._optimizer, self._stages, self._entries, self._python)


def _matching(target: Slice, entry: TensorEntry | None) -> TensorEntry:
    if entry is None:
        raise ValueError(f"it has no {target.name}")
    here = (tuple(target.tensor.shape), target.global_shape, target.offset)
    there = (entry.shape, entry.global_shape, entry.offset)
    if here != there:
        raise ValueError(f"{target.name} is cut otherwise: {there}, here {here}")
    return entry
