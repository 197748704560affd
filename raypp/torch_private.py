"""torch's private names: what raypp uses of them, under names of its own. No other file names one.

torch may change a private name in any release. Each entry says what raypp needs it for and since which release torch
has it; "since 2.4" may be earlier, for older releases were not looked at. Everything here is for torch 2.11 to 2.13.
When a new torch breaks a name, mend it here. `tests/unit/test_torch_private.py` fails on one anywhere else.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.distributed.pipelining.schedules import _Action, _add_reduce_grad, _add_unshard_reshard, _ComputationType
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

__all__ = [
    "ATTENTION_OPERATORS",
    "ChunkStage",
    "Computation",
    "GROUPED_MM_OPERATOR",
    "LoweredAction",
    "add_reduce_grad",
    "add_unshard_reshard",
    "backends_on",
    "compute_local_shape_and_global_offset",
    "flash_attention_for_cpu",
    "flash_attention_for_cpu_backward",
    "foreach_mul_",
    "foreach_norm",
    "fsspec_writer",
    "restart_group_names",
    "stage_backward_input",
    "stage_backward_weight",
]

# Programs (pipeline.runtime): torch's passes say where weights are gathered, freed and their gradients reduced.

LoweredAction = _Action
"""`pipelining.schedules._Action`: one action of a program, what the passes take and give. Since 2.4; its fields in this
order since 2.5."""

Computation = _ComputationType
"""`pipelining.schedules._ComputationType`: the kind of an action. Since 2.4; FULL_BACKWARD and BACKWARD_INPUT since
2.6, REDUCE_GRAD since 2.10."""

add_unshard_reshard = _add_unshard_reshard
"""`pipelining.schedules._add_unshard_reshard`: adds UNSHARD and RESHARD to a rank's compute actions. Since 2.5."""

add_reduce_grad = _add_reduce_grad
"""`pipelining.schedules._add_reduce_grad`: adds REDUCE_GRAD after a stage's last backward. Since 2.10."""

# `pipelining._backward.stage_backward_input` and `stage_backward_weight`: the two halves of a backward
# (pipeline.split). Since 2.5.


class ChunkStage(PipelineStage):
    """torch's forward and backward of one microbatch, on tensors that the subclass hands over.

    torch's stage fixes all shapes when it is made and owns the messages between stages. Both are left out here: a
    subclass overrides `take_activations` and `take_gradients` and sends what `fwd_cache` and `bwd_cache` hold.

    Private names it overrides or sets:
        `_retrieve_recv_activations`, `_retrieve_recv_grads`: Where torch takes what has arrived. Since 2.4.
        `_stage_meta`: Where a backward of 2.13 reads how many inputs the stage has. Not in 2.11.
        `_validate_fwd_input`, `_validate_fwd_outputs`: A forward of 2.11 compares shapes in them. Not in 2.13.

    Args:
        module: The stage's module; when it is sharded it must itself be FSDP's root.
        index: Its place, of `num_stages`.
        num_stages: Stages of the pipeline.
        device: Where it computes.
        group: Of the pipeline's ranks.
    """

    def __init__(
        self, module: nn.Module, index: int, num_stages: int, device: torch.device, group: dist.ProcessGroup
    ) -> None:
        # A placeholder for both ends switches torch's shape inference off.
        placeholder = torch.empty(1, device="meta")
        super().__init__(
            module, index, num_stages, device, input_args=placeholder, output_args=placeholder, group=group
        )
        one = (None,)
        self._stage_meta = SimpleNamespace(inputs=one, outputs=one, input_grads=one, output_grads=one)  # type: ignore[assignment]

    def take_activations(self, microbatch: int) -> Tensor:
        """The input of a stage that is not the first, `[B, T, C]`. Called once per forward."""
        raise NotImplementedError

    def take_gradients(self, microbatch: int) -> Tensor:
        """The gradient of the output of a stage that is not the last, `[B, T, C]`. Called once per backward."""
        raise NotImplementedError

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        """torch's. The keyword arguments are kept out of the backward: 2.11 takes each for an input with a gradient."""
        output = super().forward_one_chunk(fwd_chunk_id, args, kwargs, save_forward_output)
        outputs, inputs = self.fwd_cache[fwd_chunk_id]
        self.fwd_cache[fwd_chunk_id] = (outputs, inputs[:1])
        return output

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> tuple[Tensor]:
        return (self.take_activations(fwd_chunk_id),)

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> tuple[Tensor]:
        return (self.take_gradients(bwd_chunk_id),)

    def _validate_fwd_input(self, args: Any, kwargs: Any) -> None:
        """Shapes are the subclass' to check."""

    def _validate_fwd_outputs(self, outputs: Any) -> None:
        """Shapes are the subclass' to check."""


# Parts of tensors (parallel.shard, checkpoint.state).
# `tensor._utils.compute_local_shape_and_global_offset`: where this rank's part of a DTensor lies in the whole. Under
# this path since 2.5.

# Operators (parallel.attention_blocks, parallel.recompute, train.reduce).

flash_attention_for_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""The kernel behind torch's attention on CPUs, which also gives the lse. Since 2.4."""

flash_attention_for_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
"""Its backward, which takes the lse of all blocks. Since 2.4."""

ATTENTION_OPERATORS = ("aten::_scaled_dot_product", "aten::_flash_attention", "aten::_efficient_attention")
"""How the names of attention's operators begin, as selective checkpointing sees them. Since 2.4."""

GROUPED_MM_OPERATOR = "aten::_grouped_mm"
"""The operator of the public `torch.nn.functional.grouped_mm`, as selective checkpointing sees it. Since 2.8."""

foreach_norm = torch._foreach_norm
"""The norms of many tensors at once. Since 2.4."""

foreach_mul_ = torch._foreach_mul_
"""Multiplies many tensors in place at once. Since 2.4."""

# Process groups (train.process_group, train.abort).


def backends_on(device: torch.device) -> list[Any]:
    """The backends of all of this process' groups for a device.

    `distributed_c10d._world.pg_map` and `ProcessGroup._get_backend`, to abort what waits in them. Since 2.4.
    """
    found = []
    for group in list(dist.distributed_c10d._world.pg_map):
        with contextlib.suppress(RuntimeError):  # a group without this device
            found.append(group._get_backend(device))
    return found


def restart_group_names() -> None:
    """Makes the next group be called "0", as in a new process. Call it while there is no group.

    `distributed_c10d._world.group_count`: a group's name, which is in its keys in the store, is this count; a join
    that failed half-way leaves it raised. Since 2.4.
    """
    dist.distributed_c10d._world.group_count = 0


# Benchmarks.


def fsspec_writer() -> type[Any]:
    """torch's own writer of checkpoints to object stores, to compare with; needs fsspec.

    `checkpoint._fsspec_filesystem.FsspecWriter`: torch has no public name for it. Since 2.4.
    """
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

    return FsspecWriter
