"""Sums of a stage's gradients over replicas (mesh.dp_replicate), beside the last backward.

FSDP waits for its all-reduce over replicas. Here the sum of a block starts when its gradients are
done, and is awaited at the end of the step: the same flat gradients, so exact sums have the same
bits; or int8 with error feedback.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate

from raypp.stages.parallel.shard import local_part, sharded_like
from raypp.torch_private import reduced_together, take_replica_sum


@dataclass
class _Flat:
    """What FSDP reduces together: the gradients of one module, as one flat tensor of N numbers.
    `group`: the replicas. `residual`: what rounding has left over, `[N]`; None for exact sums.
    `pending`: the residual after the sum under way, `[N]`; None if there is none."""

    module: FSDPModule
    group: dist.ProcessGroup
    residual: Tensor | None = None
    pending: Tensor | None = None


def _finish(work: dist.Work, result: Tensor, messages: list[Tensor]) -> None:
    work.wait()
    if messages:
        add_up(messages, result)


@dataclass(frozen=True)
class Residuals:
    """This rank's residuals of quantised sums, which are part of the training state. `replica`:
    this rank's place among the replicas. `parts`: by the parameter's global name: this replica's
    residual, sharded like the parameter."""

    replica: int
    replicas: int
    parts: dict[str, Tensor]


def residuals_of(stage: nn.Module) -> Residuals | None:
    """Returns a stage's residuals of int8 sums; None if its sums are exact."""
    held: Residuals | None = getattr(stage, "replica_residuals", None)
    return held


class ReplicaSums:
    """The sums over replicas of one stage, in place of FSDP's all-reduce. `int8`: quantise what is
    sent. `late`: whether sums complete in `wait`, which is possible on a CPU when gradients are
    reduced in the dtype of the weights. Else each is awaited before FSDP goes on; on a GPU it is
    FSDP's stream that waits, not the host."""

    def __init__(self, stage: nn.Module, *, int8: bool, late: bool) -> None:
        self.int8, self.late = int8, late
        self.timed: Callable[[], AbstractContextManager[Any]] = nullcontext
        """Returns a context around the start of each sum."""
        self._under_way: list[Callable[[], None]] = []
        """Each waits for a sum, and completes it."""
        self._flats: list[_Flat] = []
        for module in stage.modules():
            if isinstance(module, FSDPModule) and (group := take_replica_sum(module)) is not None:
                flat = _Flat(module, group)
                module.set_all_reduce_hook(self._start_of(flat))
                self._flats.append(flat)

    @property
    def under_way(self) -> int:
        """The number of sums in flight."""
        return len(self._under_way)

    def wait(self) -> None:
        """Waits for all sums in flight. Call it before anything reads the gradients."""
        for finish in self._under_way:
            finish()
        self._under_way.clear()

    def allocate(self, stage: nn.Module) -> None:
        """Allocates the residuals of int8 sums, as zeros, once the weights have memory.
        `residuals_of` then finds them: they are part of a checkpoint."""
        if not self.int8:
            return
        names = {id(parameter): name for name, parameter in stage.named_parameters()}
        parts: dict[str, Tensor] = {}
        for flat in self._flats:
            places, size = _layout(reduced_together(flat.module))
            for parameter, begin in places:
                if flat.residual is None:
                    flat.residual = torch.zeros(size, dtype=parameter.dtype, device=parameter.device)
                local = local_part(parameter)
                view = flat.residual[begin : begin + local.numel()].view(local.shape)
                parts[names[id(parameter)]] = sharded_like(parameter, view, parameter.shape)
        group = self._flats[0].group
        stage.replica_residuals = Residuals(group.rank(), group.size(), parts)  # type: ignore[assignment]

    def _start_of(self, flat: _Flat) -> Callable[[Tensor], None]:
        def start(gradient: Tensor) -> None:
            """Starts the sum of a flat gradient `[N]`, in place. Collective over the replicas."""
            with self.timed():
                if self.int8:
                    work, messages = self._in_int8(flat, gradient)
                else:
                    work, messages = dist.all_reduce(gradient, group=flat.group, async_op=True), []
                assert work is not None
                self._under_way.append(partial(_finish, work, gradient, messages))
                if not self.late:
                    self.wait()

        return start

    def _in_int8(self, flat: _Flat, gradient: Tensor) -> tuple[dist.Work | None, list[Tensor]]:
        """Starts the int8 sum of a flat gradient `[N]`. Collective over the replicas. Returns the
        work, and the messages that the replicas send."""
        if flat.residual is None or flat.residual.numel() != gradient.numel():
            expected = 0 if flat.residual is None else flat.residual.numel()
            raise RuntimeError(f"FSDP reduces {gradient.numel()} numbers, but there are residuals of {expected}")
        message, flat.pending = encode(gradient, flat.residual)
        everyone = message.new_empty(flat.group.size(), message_size(gradient.numel()))
        messages = list(everyone.unbind())
        return dist.all_gather(messages, message, group=flat.group, async_op=True), messages

    @torch.no_grad()
    def keep_residuals(self) -> None:
        """Makes the step's residuals those of the next one. Call it after the update, if there was
        one: gradients that do not count leave no residuals."""
        for flat in self._flats:
            if flat.pending is not None and flat.residual is not None:
                flat.residual.copy_(flat.pending)
            flat.pending = None

    def drop_residuals(self) -> None:
        """Forgets the residuals of a step that is not applied."""
        for flat in self._flats:
            flat.pending = None


def _layout(parameters: Sequence[nn.Parameter]) -> tuple[list[tuple[DTensor, int]], int]:
    """Returns where the shard of each parameter begins in FSDP's flat gradient, and its length.
    Frozen parameters have no gradient. A shard takes as many rows as the longest one."""
    places: list[tuple[DTensor, int]] = []
    begin = 0
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        assert isinstance(parameter, DTensor)
        mesh, shape, shards = parameter.device_mesh, list(parameter.shape), 1
        for axis, size, layout in zip(mesh.mesh_dim_names or (), mesh.shape, parameter.placements, strict=True):
            dim = getattr(layout, "dim", 0)
            if axis == "tp":  # FSDP shards what tp has cut
                shape[dim] //= size
            elif not isinstance(layout, Replicate):
                shards *= size
                if dim != 0 and size > 1:
                    raise ValueError("int8 sums need weights that are sharded along their first dim")
        places.append((parameter, begin))
        begin += -(-shape[0] // shards) * prod(shape[1:])
    return places, begin


# Sums in 8 or 4 bits, with error feedback: of gradients, or changes of weights.
#
# Each replica sends its gradient as int8 numbers, one fp32 scale per block of `BLOCK` numbers, and
# adds up what all replicas sent, in their order. So all replicas get the same bits. What rounding
# took away from a replica's gradient is its residual: the replica adds it to its gradient in the
# next step. Nothing is lost, it only arrives later: over many steps, the sums of what was delivered
# and of the gradients differ by the last residuals alone.
#
# Legend: N numbers of a flat gradient, K blocks of them, R replicas.

BLOCK = 256
"""Numbers with one scale."""
_STEPS = {8: 127, 4: 7}


def message_size(numbers: int, bits: int = 8) -> int:
    """Returns the bytes of a message of so many numbers, in 8 or 4 bits, and a scale per block."""
    blocks = -(-numbers // BLOCK)
    return blocks * (4 + BLOCK * bits // 8)


@torch.no_grad()
def encode(gradient_N: Tensor, residual_N: Tensor, bits: int = 8) -> tuple[Tensor, Tensor]:
    """Quantises a gradient and the residual of the last step. Rounds to the nearest number: the
    same input gives the same message. A block with a non-finite number arrives non-finite. `bits`:
    of a number, 8 or 4. Returns the message, uint8 `[4 K + 32 bits K]` with the scales first, and
    the new residual `[N]`."""
    numbers, blocks, steps = gradient_N.numel(), -(-gradient_N.numel() // BLOCK), _STEPS[bits]
    wanted = gradient_N.new_zeros(blocks * BLOCK)
    torch.add(gradient_N, residual_N, out=wanted[:numbers])
    wanted_KB = wanted.view(blocks, BLOCK)
    message = torch.empty(message_size(numbers, bits), dtype=torch.uint8, device=gradient_N.device)
    scales_K1, packed = _parts(message, bits)
    scales_K1.copy_(wanted_KB.abs().amax(dim=1, keepdim=True) / steps)
    # A block of zeros has scale 0. So has one whose largest number is below the smallest scale: all
    # of it stays in the residual.
    steps_KB = wanted_KB / torch.where(scales_K1 == 0, torch.inf, scales_K1).to(wanted.dtype)
    rounded_KB = steps_KB.round_().clamp_(-steps, steps)
    if bits == 4:
        halves = (rounded_KB.nan_to_num(0.0) + 8).to(torch.uint8)  # 1 to 15
        rounded_KB = halves[:, ::2] | halves[:, 1::2] << 4
    packed.copy_(rounded_KB)
    wanted_KB.sub_(decoded(message, wanted.dtype, bits))
    return message, wanted[:numbers]


@torch.no_grad()
def add_up(messages: list[Tensor], sum_N: Tensor) -> None:
    """Writes the sum of the replicas' messages, in their order, to `[N]`. `messages`: those of all
    R replicas, each as `encode` returned it. `sum_N`: receives the sum."""
    total_KB = decoded(messages[0], sum_N.dtype)
    for message in messages[1:]:
        total_KB.add_(decoded(message, sum_N.dtype))
    sum_N.copy_(total_KB.view(-1)[: sum_N.numel()])


def scales_and_numbers(message: Tensor, rows: int, width: int) -> tuple[Tensor, Tensor]:
    """Returns views of a uint8 message `[rows · (width + 4)]`: scales fp32 `[rows, 1]` and numbers
    int8 `[rows, width]`."""
    scales = message[: 4 * rows].view(torch.float32).view(rows, 1)
    return scales, message[4 * rows :].view(torch.int8).view(rows, width)


def _parts(message: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Returns views of a message: scales fp32 `[K, 1]`, and numbers int8 `[K, 256]` or two in each
    uint8 `[K, 128]`."""
    width = BLOCK * bits // 8
    scales_K1, numbers = scales_and_numbers(message, message.numel() // (4 + width), width)
    return scales_K1, numbers if bits == 8 else numbers.view(torch.uint8)


def decoded(message: Tensor, dtype: torch.dtype, bits: int = 8) -> Tensor:
    """Returns the numbers of a message, `[K, 256]`."""
    scales_K1, numbers_KB = _parts(message, bits)
    if bits == 4:
        numbers_KB = torch.stack((numbers_KB & 15, numbers_KB >> 4), dim=-1).flatten(1).to(torch.int8) - 8
    return numbers_KB.to(dtype).mul_(scales_K1.to(dtype))
