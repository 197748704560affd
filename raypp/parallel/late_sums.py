"""Reduce-scatter of gradients on CPU: sends half the bytes of gloo's, and can wait late.

gloo implements reduce-scatter as an all-reduce of which each rank keeps its part, so it sends twice
the bytes needed. Here, every rank sends each other rank its part and adds what it receives in rank
order, so the sum does not depend on timing. Where FSDP allows it (`LateSums.late`), the sums of all
blocks are in flight at once while other stages of the rank compute. On CUDA, FSDP does the same
with a separate stream, once `reduce_within_backward` lets it start.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from raypp.torch_private import add_to_sums, end_backward


class SumsUnderWay:
    """Sums of gradients that are in flight together.

    Args:
        late: True: sums complete in `wait`. FSDP must not read them before. False: each is awaited
            before FSDP goes on.
    """

    def __init__(self, *, late: bool) -> None:
        self.late = late
        self.timed: Callable[[], AbstractContextManager[Any]] = nullcontext
        """Returns a context around the start of each sum."""
        self._under_way: list[Callable[[], None]] = []
        """Each waits for a sum, and completes it."""

    @property
    def under_way(self) -> int:
        """The number of sums in flight."""
        return len(self._under_way)

    def wait(self) -> None:
        """Waits for all sums in flight. Call it before anything reads the gradients."""
        for finish in self._under_way:
            finish()
        self._under_way.clear()


def _finish(work: dist.Work, sent: Tensor, parts: Tensor, result: Tensor) -> None:
    """Waits for a reduce-scatter, and writes the sum of its parts, added in rank order.

    Args:
        work: The handle of the all-to-all.
        sent: The gradients sent, `[ranks · size]`; they must stay alive until the work is done.
        parts: The gradients received, `[ranks · size]`, in rank order.
        result: Where the sum goes, `[size]`.
    """
    work.wait()
    result = result.view(-1)
    first, *others = parts.view(-1, result.numel())
    result.copy_(first)
    for part in others:
        result.add_(part)


class LateSums(SumsUnderWay):
    """The reduce-scatter that FSDP uses for the modules of one stage on CPU.

    It needs extra memory as large as the gradients in flight. It may be late when gradients are
    reduced in the dtype of the weights (fp32) along one axis.
    """

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocates a buffer `[*size]` for FSDP."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Starts one reduce-scatter. Collective over the group.

        Args:
            output_tensor: Receives this rank's part of the sum, `[size]`.
            input_tensor: This rank's gradients, `[ranks · size]`.
            group: The ranks that share the parameters.
            op: Must be SUM.
            async_op: Ignored: `late` decides when to wait.

        Raises:
            ValueError: FSDP asks for another reduction than a sum.
        """
        if op != dist.ReduceOp.SUM:
            raise ValueError(f"this reduce-scatter only sums gradients, but FSDP asks for {op}")
        with self.timed():
            parts = torch.empty_like(input_tensor)
            work = dist.all_to_all_single(parts, input_tensor, group=group, async_op=True)
            assert work is not None
            self._under_way.append(partial(_finish, work, input_tensor, parts, output_tensor))
            if not self.late:
                self.wait()


def reduce_within_backward(stage: FSDPModule, root: Tensor, *, last: bool = True, frees: bool = True) -> None:
    """Makes the backward from `root` start the sum of each block once its gradients are done.

    Sums that cannot start within this backward start after it, as usual. After the last backward of
    a step the caller must end the reduction (`PipelineStage.perform_reduce_grad`): only that makes
    the device's compute wait for the sums, so on a GPU they overlap with all that is computed in
    between.

    Args:
        stage: The stage whose gradients are summed.
        root: The stage's output `[B, T, C]`, or the scalar loss: where the backward starts.
        last: Whether it is the stage's last backward in the step. Before that, FSDP adds up what is
            summed over shards, and sums over replicas are left to the last one.
        frees: Whether each block frees its gathered weights after its use.
    """

    # Set the flags in the backward: torch's pipelining has just cleared them.
    root.register_hook(lambda _: _reduce_from_here(stage, last=last, frees=frees))  # type: ignore[no-untyped-call]


def _reduce_from_here(stage: FSDPModule, *, last: bool, frees: bool) -> None:
    stage.set_reshard_after_backward(frees)
    stage.set_requires_gradient_sync(True)
    stage.set_requires_all_reduce(last)


def reduce_now(stage: FSDPModule, *, last: bool) -> None:
    """Sums the gradients that lie at a stage's gathered weights, after a backward of weights alone.

    `last`: as for `reduce_within_backward`.
    """
    _reduce_from_here(stage, last=last, frees=False)
    for module in reversed(list(stage.modules())):  # type: ignore[attr-defined]
        if isinstance(module, FSDPModule):
            add_to_sums(module)  # those of norms may be from the other half of the backward
            end_backward(module)


def free_within_backward(stage: FSDPModule, root: Tensor) -> None:
    """Makes the backward from `root` free the gathered weights of each block after its use.

    Args:
        stage: The stage.
        root: As for `reduce_within_backward`, which frees them, too.
    """
    root.register_hook(lambda _: stage.set_reshard_after_backward(True))  # type: ignore[no-untyped-call]


def sum_by_parts(stage: nn.Module, *, late: bool) -> LateSums:
    """Installs `LateSums` on a sharded stage on CPU. The caller calls `wait` after each step."""
    sums = LateSums(late=late)
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(sums)  # type: ignore[arg-type]
    return sums
