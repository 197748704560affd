"""A pipeline stage whose shapes come from a plan, microbatch by microbatch.

torch's `PipelineStage` fixes one shape for all microbatches and keeps a receive buffer for each of them for its
whole life. `PlannedStage` is told before each step how long every microbatch is; it allocates a receive buffer when
the receive is posted and forgets it after the backward. No metadata travels between stages, nothing is cached per
length, and a tensor that does not match the plan raises by name: gloo would part-fill the receiver's buffer silently.

The runtime (`pipeline.runtime`) calls it; torch's own forward and backward of a chunk are used as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

_UNWRITTEN = 0x5A
"""Fills the last number of a receive buffer: 0x5A5A5A5A as a float is 1.5e16, which no layer gives."""


class PlanMismatch(RuntimeError):
    """A stage computed or received a tensor that the plan of the step does not announce: a bug, not bad luck."""


class PlannedStage(PipelineStage):
    """One stage of the pipeline.

    Args:
        module: The stage's module; when it is sharded it must itself be FSDP's root.
        index: Its place, of `num_stages`.
        rank_of_stage: Pipeline rank of every stage.
        hidden_size: Width of the activations between stages.
        dtype: Their dtype.
        device: Where it computes.
        forward_group: Carries activations.
        backward_group: Carries gradients.
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
        forward_group: dist.ProcessGroup,
        backward_group: dist.ProcessGroup,
    ) -> None:
        # A placeholder for both ends switches torch's shape inference off; the real shapes are in the plan.
        placeholder = torch.empty(1, device="meta")
        super().__init__(
            module, index, num_stages, device, input_args=placeholder, output_args=placeholder, group=forward_group
        )
        self.rank_of_stage = list(rank_of_stage)
        self.hidden_size = hidden_size
        self.boundary_dtype = dtype
        self.backward_group = backward_group
        self.shapes: list[tuple[int, int, int]] = []
        self.received: dict[int, Tensor] = {}
        self.received_grads: dict[int, Tensor] = {}
        # The two places torch reads the number of forward inputs from: 2.13, then 2.11.
        one = (None,)
        self._stage_meta = SimpleNamespace(inputs=one, outputs=one, input_grads=one, output_grads=one)  # type: ignore[assignment]
        self.inputs_meta = (None,)

    def plan(self, rows: int, seq_lens: Sequence[int], *, backward: bool) -> None:
        """Announces the next step: `rows` × `seq_lens[i]` tokens in microbatch i. Drops what a broken step left."""
        self.shapes = [(rows, length, self.hidden_size) for length in seq_lens]
        self.chunks = len(self.shapes)
        self.has_backward = backward
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
        return self._send(output.detach(), microbatch, self.stage_index + 1, self.group, "activations")

    def send_backward(self, microbatch: int) -> dist.Work:
        (gradient,) = self.bwd_cache.pop(microbatch)
        return self._send(gradient, microbatch, self.stage_index - 1, self.backward_group, "gradients")

    def receive_forward(self, microbatch: int) -> dist.Work:
        buffer = self._buffer(microbatch)
        self.received[microbatch] = buffer
        work = dist.irecv(buffer, group=self.group, group_src=self.rank_of_stage[self.stage_index - 1])
        assert work is not None
        return work

    def receive_backward(self, microbatch: int) -> dist.Work:
        buffer = self._buffer(microbatch)
        self.received_grads[microbatch] = buffer
        work = dist.irecv(buffer, group=self.backward_group, group_src=self.rank_of_stage[self.stage_index + 1])
        assert work is not None
        return work

    def _buffer(self, microbatch: int) -> Tensor:
        buffer = torch.empty(self.shapes[microbatch], dtype=self.boundary_dtype, device=self.device)
        if buffer.device.type == "cpu":
            _last_number(buffer).fill_(_UNWRITTEN)
        return buffer

    def _filled(self, buffer: Tensor, microbatch: int, from_stage: int, what: str) -> Tensor:
        """A buffer whose receive is done. gloo takes a shorter message without a word and leaves the rest unwritten.

        On a device the question would make the CPU wait for it, and is not asked.
        """
        received = self.rank_of_stage[from_stage] != self.rank_of_stage[self.stage_index]
        if received and buffer.device.type == "cpu" and bool((_last_number(buffer) == _UNWRITTEN).all()):
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

    def _send(
        self, tensor: Tensor | None, microbatch: int, to_stage: int, group: dist.ProcessGroup | None, what: str
    ) -> dist.Work:
        if tensor is None:
            raise PlanMismatch(
                f"stage {self.stage_index} has no {what} of microbatch {microbatch} for stage {to_stage}"
            )
        self._check(tensor, microbatch, f"{what} of microbatch {microbatch} for stage {to_stage}")
        work = dist.isend(tensor.contiguous(), group=group, group_dst=self.rank_of_stage[to_stage])
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

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> tuple[Tensor, ...]:
        activations = self._filled(self.received.pop(fwd_chunk_id), fwd_chunk_id, self.stage_index - 1, "activations")
        return (activations.requires_grad_(self.has_backward),)

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> tuple[Tensor, ...]:
        gradients = self.received_grads.pop(bwd_chunk_id)
        return (self._filled(gradients, bwd_chunk_id, self.stage_index + 1, "gradients"),)

    def _check_chunk_id(self, chunk_id: int) -> None:
        """torch 2.13 refuses ids past a count it took at start; the plan may change that count at each step."""


def _last_number(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor's last number."""
    return tensor.view(-1)[-1:].view(torch.uint8)
