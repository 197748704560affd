"""Gradient sums of sharded stages that are begun at the last backward and waited for at the end of the step.

On CUDA FSDP's reduce-scatter runs on a stream of its own. On CPUs it holds the rank up, block after block, while other
stages of the same rank could compute and messages could be sent. Here all blocks' sums are under way at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule


class LateSums:
    """FSDP's reduce-scatter for the modules of one stage: begins it, and waits when `wait` is called.

    Only for results that FSDP does not look at before: on CPUs, reduced in the dtype of the weights (fp32), along one
    axis (a sum over replicas, too, would follow at once). Sums and their order are those of FSDP's own.
    """

    def __init__(self) -> None:
        self._works: list[tuple[dist.Work, Tensor]] = []

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        # 2.13 has a newer name for it, which 2.11 lacks.
        reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        work = reduce_scatter(output_tensor, input_tensor, op=op, group=group, async_op=True)
        self._works.append((work, input_tensor))  # which must live until it is done

    def wait(self) -> None:
        """Returns when every sum that was begun is there. Before anything reads the gradients."""
        for work, _ in self._works:
            work.wait()
        self._works.clear()


def sum_late(stage: nn.Module) -> None:
    """Makes a sharded stage's gradient sums late; the runtime calls `stage.late_sums.wait()`."""
    late = LateSums()
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(late)  # type: ignore[arg-type]
    stage.late_sums = late  # type: ignore[assignment]
