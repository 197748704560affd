"""A pipeline stage whose shapes come from a plan, microbatch by microbatch.

torch's `PipelineStage` fixes one shape for all microbatches. `PlannedStage` gets their lengths
before each step, allocates a receive buffer when the receive is posted, and drops it after the
backward. A tensor that does not match the plan raises a named error; gloo would fill part of the
buffer silently. Messages have the wire format (`pipeline.wire`) that both ends derive.

Legend: B rows of a microbatch, T its tokens on this rank, C hidden size.
"""

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from raypp.planning.schedules.communication import MessageKind
from raypp.stages.models.products import LaterGradients, weights_later
from raypp.stages.parallel.replica_sums import ReplicaSums
from raypp.stages.pipeline.wire import AsIs, WireFormat, message_seed
from raypp.torch_private import ChunkStage


class PlanMismatch(RuntimeError):
    """A stage computed or received a tensor that the step's plan does not announce: a bug."""


class PlannedStage(ChunkStage):
    """One stage of the pipeline.

    Args:
        module: The stage's module; if it is sharded, it must itself be FSDP's root.
        up_group: Carries messages to higher pipeline ranks (with one stage per rank: activations).
        down_group: Carries messages to lower pipeline ranks.
        activations: Wire format of activations; None: as computed.
        gradients: Wire format of gradients; None: as computed.
        seed: Seeds the formats' random numbers, with the step, the stage and the microbatch.
        replica_sums: The sums over replicas that FSDP does not take; None if there are none.
        replicated: Whether other replicas hold the same weights.
        reduces_each: Whether every backward sums gradients over the ranks that share weights.
        below_trains: Whether a stage below has trained parameters. If not, the backward ends here.
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
        replica_sums: ReplicaSums | None = None,
        replicated: bool = False,
        frees_weights: bool = False,
        reduces_each: bool = False,
        below_trains: bool = True,
    ) -> None:
        super().__init__(module, index, num_stages, device, up_group)
        self.rank_of_stage = list(rank_of_stage)
        self.hidden_size = hidden_size
        self.boundary_dtype = dtype
        self.up_group, self.down_group, self.seed = up_group, down_group, seed
        self.frees_weights, self.below_trains = frees_weights, below_trains
        self.replica_sums, self.replicated, self.reduces_each = replica_sums, replicated, reduces_each
        self._exact = AsIs(dtype)
        self._formats = activations or self._exact, gradients or self._exact
        self.shapes: list[tuple[int, int, int]] = []
        self.received: dict[int, Tensor] = {}
        self.received_grads: dict[int, Tensor] = {}
        self.sent_bytes = 0
        self._split: Collection[int] = ()
        self._later: dict[int, LaterGradients] = {}

    def plan(
        self, rows: int, seq_lens: Sequence[int], *, backward: bool, step: int = 0, split: Collection[int] = ()
    ) -> None:
        """Sets the shapes of the next step and drops what an aborted step left behind.

        Without a backward, messages travel as computed: an evaluation measures the weights, not the
        wire format.

        Args:
            rows: B, of every microbatch.
            seq_lens: T of each microbatch.
            split: Microbatches whose backward here is split.
        """
        self._split = split
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
        self._later.clear()
        self.output_chunks.clear()

    @property
    def sums_beside(self) -> bool:
        """Whether sums of gradients can run beside the backward that completes the gradients."""
        return self.device.type != "cpu" or (self.replica_sums is not None and self.replica_sums.late)

    # Messages to and from other ranks.

    def send(self, kind: MessageKind, microbatch: int) -> dist.Work:
        """Sends a microbatch's activations or its input's gradients `[B, T, C]`; never waits."""
        if kind == "F":
            (output,), _ = self.fwd_cache[microbatch]
            return self._send(output.detach(), microbatch, self.stage_index + 1, self.activations, "activations")
        (gradient,) = self.bwd_cache.pop(microbatch)
        return self._send(gradient, microbatch, self.stage_index - 1, self.gradients, "gradients")

    def receive(self, kind: MessageKind, microbatch: int, after: Any = None) -> dist.Work:
        """Posts the receive of a microbatch's activations or gradients, as the wire format sends
        them. `after`: an event that the device reaches before the receive begins; None: at once."""
        received, form, source, _ = self._incoming(kind)
        with posting_receives(self.device, after):
            received[microbatch] = self._buffer(form, microbatch)
            return self._receive(received[microbatch], source)

    def unpack(self, kind: MessageKind, microbatch: int) -> None:
        """Decodes a message into the stage's input, or the gradients of its output, `[B, T, C]`."""
        received, form, source, noun = self._incoming(kind)
        message = self._filled(received[microbatch], form, microbatch, source, noun)
        received[microbatch] = form.decode(message, self.shapes[microbatch], self.boundary_dtype)

    def _incoming(self, kind: MessageKind) -> tuple[dict[int, Tensor], WireFormat, int, str]:
        """Returns where messages of a kind are kept, their format, their sender, and their name."""
        if kind == "F":
            return self.received, self.activations, self.stage_index - 1, "activations"
        return self.received_grads, self.gradients, self.stage_index + 1, "gradients"

    def _buffer(self, form: WireFormat, microbatch: int) -> Tensor:
        """Allocates a receive buffer for a message `[...]`; marks its last number as unwritten."""
        buffer = form.buffer(self.shapes[microbatch], self.device)
        if buffer.device.type == "cpu":
            _last_number(buffer).fill_(form.unwritten)
        return buffer

    def _filled(self, buffer: Tensor, form: WireFormat, microbatch: int, from_stage: int, noun: str) -> Tensor:
        """Returns a received buffer `[...]`, after checking that the message filled it. gloo
        accepts a shorter message silently and leaves the rest of the buffer unwritten. The check
        would block the host on CUDA, so only CPU buffers are checked."""
        if buffer.device.type == "cpu" and bool((_last_number(buffer) == form.unwritten).all()):
            raise PlanMismatch(
                f"stage {self.stage_index}: {noun} of microbatch {microbatch} from stage {from_stage} are fewer than "
                f"the plan says, {self.shapes[microbatch]}: the ranks follow different plans"
            )
        return computes_on(buffer)

    def _check(self, tensor: Tensor, microbatch: int, name: str) -> None:
        """Raises unless a tensor is `[B, T, C]` as planned, in the boundary dtype."""
        if tuple(tensor.shape) != self.shapes[microbatch] or tensor.dtype != self.boundary_dtype:
            raise PlanMismatch(
                f"stage {self.stage_index}: {name} are {tuple(tensor.shape)} {tensor.dtype}, "
                f"the plan says {self.shapes[microbatch]} {self.boundary_dtype}"
            )

    def _receive(self, buffer: Tensor, from_stage: int) -> dist.Work:
        """Posts the receive of a message `[...]` into a buffer. Not `batch_isend_irecv`: NCCL would
        run all ranks of the group on one communicator and its one stream. Single operations have a
        communicator for each pair of ranks."""
        source, own = self.rank_of_stage[from_stage], self.rank_of_stage[self.stage_index]
        work = dist.irecv(buffer, group=self.up_group if own > source else self.down_group, group_src=source)
        assert work is not None
        return work

    def _send(self, tensor: Tensor | None, microbatch: int, to_stage: int, form: WireFormat, noun: str) -> dist.Work:
        """Encodes a tensor `[B, T, C]` and posts its send."""
        if tensor is None:
            raise PlanMismatch(
                f"stage {self.stage_index} has no {noun} of microbatch {microbatch} for stage {to_stage}"
            )
        self._check(tensor, microbatch, f"{noun} of microbatch {microbatch} for stage {to_stage}")
        message = form.encode(tensor, message_seed(self.seed, self.step, self.stage_index, to_stage, microbatch))
        self.sent_bytes += message.numel() * message.element_size()
        to, own = self.rank_of_stage[to_stage], self.rank_of_stage[self.stage_index]
        work = dist.isend(message, group=self.up_group if to > own else self.down_group, group_dst=to)
        assert work is not None
        return work

    # Torch's chunk functions. The I half of a backward is a whole one that leaves gradients of
    # weights for W: torch's own halves would recompute a block for each group of its weights.

    def forward_one_chunk(self, fwd_chunk_id: int, *arguments: Any, **options: Any) -> Any:
        """Runs a forward, of which a split backward will follow or a whole one."""
        if fwd_chunk_id in self._split:
            self._later[fwd_chunk_id] = LaterGradients()
        with weights_later(self._later.get(fwd_chunk_id)):
            return super().forward_one_chunk(fwd_chunk_id, *arguments, **options)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Runs a backward, or its I half."""
        with weights_later(self._later.get(bwd_chunk_id)):
            super().backward_one_chunk(bwd_chunk_id, loss=loss, full_backward=True, last_backward=last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Runs the W half of a backward."""
        self._later.pop(bwd_chunk_id).compute()

    # The interface that torch's chunk functions call.

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """Takes the activations `[B, T, C]` of the previous stage, if it is on the same rank."""
        self._check(prev_stage_outputs, mb_index, f"activations of microbatch {mb_index} from this rank's other stage")
        self.received[mb_index] = prev_stage_outputs.detach()

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int) -> None:
        """Takes the gradients `([B, T, C],)` of the next stage, if it is on the same rank."""
        (gradient,) = next_stage_bwd_outputs
        if gradient is None:
            raise PlanMismatch(
                f"stage {self.stage_index + 1} has no gradients of microbatch {mb_index} for stage {self.stage_index}"
            )
        self.received_grads[mb_index] = gradient

    def take_activations(self, microbatch: int) -> Tensor:
        """Takes the received activations `[B, T, C]`, as a leaf of the microbatch's graph."""
        return self.received.pop(microbatch).requires_grad_(self.has_backward and self.below_trains)

    def take_gradients(self, microbatch: int) -> Tensor:
        """Takes the received gradients `[B, T, C]`."""
        return self.received_grads.pop(microbatch)


def _last_number(tensor: Tensor) -> Tensor:
    """Returns the bytes of a contiguous tensor's last number, uint8 `[element size]`."""
    return tensor.view(-1)[-1:].view(torch.uint8)


@cache
def _stream(device: torch.device) -> Any:
    return torch.get_device_module(device).Stream(device)


def posting_receives(device: torch.device, after: Any = None) -> AbstractContextManager[object]:
    """Returns the context in which to allocate the buffers of receives and to post them.

    When a receive is posted, NCCL's stream first waits for the current stream. Posted under the
    stream that computes, the receive would begin only after all compute queued so far, although its
    message may have been sent long before. So receives are posted under a stream on which nothing
    ever runs. The buffer must be allocated under it, too: memory that the compute stream has freed
    may still be read by kernels in its queue, for which such a receive does not wait. Nothing of
    this happens on a CPU. `after`: an event, which the stream waits for first. The host runs ahead,
    so without one a receive would wait for its message, and hold processors, up to a whole step.
    """
    if device.type == "cpu":
        return nullcontext()
    stream = _stream(device)
    if after is not None:
        stream.wait_event(after)
    return torch.get_device_module(device).stream(stream)  # type: ignore[no-any-return]


def computes_on(buffer: Tensor) -> Tensor:
    """Records the current stream on a received buffer `[...]`. Call it after `Work.wait`. The
    allocator then gives its memory to a later receive only after the kernels that read it."""
    if buffer.device.type != "cpu":
        buffer.record_stream(torch.get_device_module(buffer.device).current_stream(buffer.device))
    return buffer
