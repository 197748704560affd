"""Gradient sums of sharded stages on CPUs: half of gloo's bytes, and waited for at the end of the step.

gloo's reduce-scatter is an all-reduce of which each rank keeps its part: it sends twice what is needed. Here every rank
sends the others their parts and adds up what it gets, in the order of the ranks, so that the sum is the same one
whoever is faster. And where FSDP lets it (`LateSums.late`) all blocks' parts are under way at once while other stages
of the rank compute, which FSDP does on CUDA with a stream of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule


@dataclass(frozen=True)
class _Sum:
    """One that is under way: what is sent (which must live until then), what arrives `[ranks · size]`, where to."""

    work: dist.Work
    sent: Tensor
    parts: Tensor
    result: Tensor

    def finish(self) -> None:
        self.work.wait()
        parts = self.parts.view(-1, self.result.numel())
        result = self.result.view(-1)
        result.copy_(parts[0])
        for part in parts[1:]:
            result.add_(part)


class LateSums:
    """FSDP's reduce-scatter for the modules of one stage, on CPUs. Takes as much memory again as is summed.

    Args:
        late: A sum may be waited for when `wait` is called. FSDP must not look at it before, which holds when it is
            reduced in the dtype of the weights (fp32) along one axis. Otherwise it is waited for at once.
    """

    def __init__(self, *, late: bool) -> None:
        self.late = late
        self._under_way: list[_Sum] = []

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        if op != dist.ReduceOp.SUM:
            raise ValueError(f"gradients are summed here, FSDP asks for {op}")
        parts = torch.empty_like(input_tensor)
        work = dist.all_to_all_single(parts, input_tensor, group=group, async_op=True)
        assert work is not None
        self._under_way.append(_Sum(work, input_tensor, parts, output_tensor))
        if not self.late:
            self.wait()

    def begin_within(self, stage: FSDPModule, root: Tensor) -> None:
        """Makes the backward of `root` begin each block's sum as soon as it has passed the block. Call it before a
        stage's last backward of a step; what cannot begin in it does after it, as ever.

        Args:
            stage: The stage these sums are for.
            root: Its output, or the loss: what the backward begins at.
        """

        def last(gradient: Tensor) -> None:
            # Only now: torch's pipelining has just told the stage that this backward is none of these.
            stage.set_is_last_backward(True)
            stage.set_reshard_after_backward(True)
            stage.set_requires_gradient_sync(True)

        if self.late:
            root.register_hook(last)  # type: ignore[no-untyped-call]

    @property
    def under_way(self) -> int:
        """Sums that were begun and not yet waited for."""
        return len(self._under_way)

    def wait(self) -> None:
        """Returns when every sum that was begun is there. Before anything reads the gradients."""
        for one in self._under_way:
            one.finish()
        self._under_way.clear()


def sum_by_parts(stage: nn.Module, *, late: bool) -> LateSums:
    """Gives a sharded stage on CPUs these sums. Whoever runs it calls their `wait` at the end of a step."""
    sums = LateSums(late=late)
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(sums)  # type: ignore[arg-type]
    return sums
