"""A pipeline stage whose shapes come from a plan, microbatch by microbatch.

torch's `PipelineStage` fixes one shape for all microbatches and keeps a receive buffer for each of them for its
whole life. `PlannedStage` is told before each step how long every microbatch is; it allocates a receive buffer when
the receive is posted and forgets it after the backward. No metadata travels between stages, nothing is cached per
length, and a tensor that does not match the plan raises by name: gloo would part-fill the receiver's buffer silently.
What travels has the dtype and size of the wire's format (`pipeline.wire`), which both ends work out from the plan.

The runtime (`pipeline.runtime`) calls it; torch's own forward and backward of a chunk are used as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from raypp.parallel.late_sums import LateSums
from raypp.pipeline.wire import AsIs, WireFormat, message_seed
from raypp.torch_private import ChunkStage


class PlanMismatch(RuntimeError):
    """A stage computed or received a tensor that the plan of the step does not announce: a bug, not bad luck."""


class PlannedStage(ChunkStage):
    """One stage of the pipeline.

    Args:
        module: The stage's module; when it is sharded it must itself be FSDP's root.
        index: Its place, of `num_stages`.
        rank_of_stage: Pipeline rank of every stage.
        hidden_size: Width of the activations between stages.
        dtype: Their dtype.
        device: Where it computes.
        up_group: Carries messages to higher pipeline ranks (with one stage per rank: activations).
        down_group: Carries messages to lower ones.
        activations: How activations travel; None: as computed.
        gradients: How gradients travel; None: as computed.
        seed: Of what the formats draw, with the step, the stage and the microbatch.
        late_sums: The module's gradient sums that are waited for at the end of a step; None: it has none.
    """

    def __init__(
        self,
        module: nn.Module,
        index: int,
        num_stages: int,
        *,
        rank_of_stage: Sequence[int],
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        up_group: dist.ProcessGroup,
        down_group: dist.ProcessGroup,
        activations: WireFormat | None = None,
        gradients: WireFormat | None = None,
        seed: int = 0,
        late_sums: LateSums | None = None,
    ) -> None:
        super().__init__(module, index, num_stages, device, up_group)
        self.rank_of_stage = list(rank_of_stage)
        self.hidden_size = hidden_size
        self.boundary_dtype = dtype
        self.up_group, self.down_group, self.seed = up_group, down_group, seed
        self.late_sums = late_sums
        self._exact = AsIs(dtype)
        self._formats = activations or self._exact, gradients or self._exact
        self.shapes: list[tuple[int, int, int]] = []
        self.received: dict[int, Tensor] = {}
        self.received_grads: dict[int, Tensor] = {}
        self.sent_bytes = 0

    def plan(self, rows: int, seq_lens: Sequence[int], *, backward: bool, step: int = 0) -> None:
        """Announces the next step: `rows` × `seq_lens[i]` tokens in microbatch i. Drops what a broken step left.

        Without a backward everything travels as computed: an evaluation is one of the weights, not of the wire.
        """
        self.shapes = [(rows, length, self.hidden_size) for length in seq_lens]
        self.chunks = len(self.shapes)
        self.has_backward = backward
        self.step = step
        self.activations, self.gradients = self._formats if backward else (self._exact, self._exact)
        self.sent_bytes = 0
        self.received.clear()
        self.received_grads.clear()
        self.fwd_cache.clear()
        self.bwd_cache.clear()
        self.backward_state.clear()
        self.dw_runner.clear()
        self.output_chunks.clear()

    # What crosses to another rank.

    def send_forward(self, microbatch: int) -> dist.Work:
        (output,), _ = self.fwd_cache[microbatch]
        return self._send(output.detach(), microbatch, self.stage_index + 1, self.activations, "activations")

    def send_backward(self, microbatch: int) -> dist.Work:
        (gradient,) = self.bwd_cache.pop(microbatch)
        return self._send(gradient, microbatch, self.stage_index - 1, self.gradients, "gradients")

    def receive_forward(self, microbatch: int) -> dist.Work:
        self.received[microbatch] = self._buffer(self.activations, microbatch)
        return self._receive(self.received[microbatch], self.stage_index - 1)

    def receive_backward(self, microbatch: int) -> dist.Work:
        self.received_grads[microbatch] = self._buffer(self.gradients, microbatch)
        return self._receive(self.received_grads[microbatch], self.stage_index + 1)

    def unpack_forward(self, microbatch: int) -> None:
        """Makes the stage's input of a message whose receive is done."""
        message = self._filled(
            self.received[microbatch], self.activations, microbatch, self.stage_index - 1, "activations"
        )
        self.received[microbatch] = self.activations.decode(message, self.shapes[microbatch], self.boundary_dtype)

    def unpack_backward(self, microbatch: int) -> None:
        """Makes the gradients of the stage's output of a message whose receive is done."""
        message = self._filled(
            self.received_grads[microbatch], self.gradients, microbatch, self.stage_index + 1, "gradients"
        )
        self.received_grads[microbatch] = self.gradients.decode(message, self.shapes[microbatch], self.boundary_dtype)

    def _buffer(self, form: WireFormat, microbatch: int) -> Tensor:
        buffer = form.buffer(self.shapes[microbatch], self.device)
        if buffer.device.type == "cpu":
            _last_number(buffer).fill_(form.unwritten)
        return buffer

    def _filled(self, buffer: Tensor, form: WireFormat, microbatch: int, from_stage: int, what: str) -> Tensor:
        """A buffer whose receive is done. gloo takes a shorter message without a word and leaves the rest unwritten.

        On a device the question would make the CPU wait for it, and is not asked.
        """
        if buffer.device.type == "cpu" and bool((_last_number(buffer) == form.unwritten).all()):
            raise PlanMismatch(
                f"stage {self.stage_index}: {what} of microbatch {microbatch} from stage {from_stage} are fewer than "
                f"the plan says, {self.shapes[microbatch]}: the ranks follow different plans"
            )
        return buffer

    def _check(self, tensor: Tensor, microbatch: int, name: str) -> None:
        if tuple(tensor.shape) != self.shapes[microbatch] or tensor.dtype != self.boundary_dtype:
            raise PlanMismatch(
                f"stage {self.stage_index}: {name} are {tuple(tensor.shape)} {tensor.dtype}, "
                f"the plan says {self.shapes[microbatch]} {self.boundary_dtype}"
            )

    def _receive(self, buffer: Tensor, from_stage: int) -> dist.Work:
        source, own = self.rank_of_stage[from_stage], self.rank_of_stage[self.stage_index]
        work = dist.irecv(buffer, group=self.up_group if own > source else self.down_group, group_src=source)
        assert work is not None
        return work

    def _send(self, tensor: Tensor | None, microbatch: int, to_stage: int, form: WireFormat, what: str) -> dist.Work:
        if tensor is None:
            raise PlanMismatch(
                f"stage {self.stage_index} has no {what} of microbatch {microbatch} for stage {to_stage}"
            )
        self._check(tensor, microbatch, f"{what} of microbatch {microbatch} for stage {to_stage}")
        message = form.encode(tensor, message_seed(self.seed, self.step, self.stage_index, to_stage, microbatch))
        self.sent_bytes += message.numel() * message.element_size()
        to, own = self.rank_of_stage[to_stage], self.rank_of_stage[self.stage_index]
        work = dist.isend(message, group=self.up_group if to > own else self.down_group, group_dst=to)
        assert work is not None
        return work

    # What torch's chunk functions ask for.

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """Takes the activations of the previous stage when it is on the same rank."""
        self._check(prev_stage_outputs, mb_index, f"activations of microbatch {mb_index} from this rank's other stage")
        self.received[mb_index] = prev_stage_outputs.detach()

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int) -> None:
        """Takes the gradients of the next stage when it is on the same rank."""
        (gradient,) = next_stage_bwd_outputs
        if gradient is None:
            raise PlanMismatch(
                f"stage {self.stage_index + 1} has no gradients of microbatch {mb_index} for stage {self.stage_index}"
            )
        self.received_grads[mb_index] = gradient

    def take_activations(self, microbatch: int) -> Tensor:
        """The activations that arrived, `[B, T, C]`, as a leaf of the microbatch's graph."""
        return self.received.pop(microbatch).requires_grad_(self.has_backward)

    def take_gradients(self, microbatch: int) -> Tensor:
        """The gradients that arrived, `[B, T, C]`."""
        return self.received_grads.pop(microbatch)


def _last_number(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor's last number."""
    return tensor.view(-1)[-1:].view(torch.uint8)
