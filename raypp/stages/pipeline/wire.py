"""Wire formats: the encoding of activations and gradients between two ranks.

A format encodes a tensor into one contiguous message whose size both ends know from the step's
plan, and decodes it. The default sends tensors as computed and keeps every bit. The others lose
precision and are used only if the job requests them:

- `bf16`: fp32 numbers rounded to the nearest bf16. Half the bytes; relative error at most 2^-8.
- `int8`: each row (the hidden vector of one token) is divided by its scale, its largest magnitude /
  127, and rounded stochastically, up with the probability of the fraction. The expected value is
  the number sent, so errors do not accumulate over microbatches in one direction. A quarter of
  fp32's bytes plus 4 per row; each number is within one scale. The random numbers are a function
  of the message's identity (seed, step, stage, microbatch), so a restarted run repeats them.

There is no error feedback: the next step's activations belong to other tokens, and its state would
have to be saved and re-cut with the mesh. Evaluation sends values as computed.

Legend: N rows, H hidden size.
"""

import hashlib
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from raypp.job.precision import DTYPES
from raypp.planning.decision import WireKind
from raypp.stages.models.quantised import torch_dtype
from raypp.stages.parallel.replica_sums import scales_and_numbers
from raypp.torch_private import Computation, LoweredAction

_STEPS = 127
"""Largest magnitude of an int8 number: symmetric, so that zero stays zero."""


class WireFormat(Protocol):
    """Encodes tensors for transfer and decodes them."""

    name: str
    unwritten: int
    """Byte that fills the last number of a receive buffer; no message ends with such a number."""

    def buffer(self, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """Allocates a buffer for the message of a tensor of that shape, `[..., H]`."""

    def encode(self, tensor: Tensor, seed: int) -> Tensor:
        """Encodes a tensor into a contiguous message of the buffer's size and dtype. `seed`: seeds
        the random numbers, if the format draws any."""

    def decode(self, message: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Decodes a message to `shape`, `[..., H]`, and `dtype`; may return the message itself."""


class AsIs:
    """Sends a torch dtype: the compute dtype (lossless), or a narrower one (rounded to nearest).
    The message has the tensor's shape `[..., H]`."""

    unwritten = 0x7E  # a float of these bytes is 8.5e37, or in fp16 a NaN that no operator makes

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.name = str(dtype).removeprefix("torch.")

    def buffer(self, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """Allocates `[..., H]` of the format's dtype."""
        return torch.empty(shape, dtype=self.dtype, device=device)

    def encode(self, tensor: Tensor, seed: int) -> Tensor:
        """Casts `[..., H]` to the format's dtype."""
        return tensor.to(self.dtype).contiguous()

    def decode(self, message: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Casts `[..., H]` to `dtype`."""
        return message.to(dtype)


class Int8:
    """Sends int8 numbers with one fp32 scale per row: uint8 `[N · (H + 4)]`, scales first. A row
    with a non-finite number arrives non-finite."""

    name = "int8"
    unwritten = 0x80  # -128

    def buffer(self, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """Allocates uint8 `[N · (H + 4)]`."""
        return torch.empty(math.prod(shape[:-1]) * (shape[-1] + 4), dtype=torch.uint8, device=device)

    @torch.no_grad()
    def encode(self, tensor: Tensor, seed: int) -> Tensor:
        """Quantizes `[..., H]` to a uint8 message `[N · (H + 4)]`."""
        rows_NH = tensor.reshape(-1, tensor.shape[-1]).float()
        scale_N1 = rows_NH.abs().amax(dim=1, keepdim=True) / _STEPS
        message = self.buffer(tuple(tensor.shape), tensor.device)
        scales, numbers = scales_and_numbers(message, *rows_NH.shape)
        scales.copy_(scale_N1)
        noise = torch.Generator(tensor.device).manual_seed(seed)
        noise_NH = torch.rand(rows_NH.shape, generator=noise, device=tensor.device)
        # A row of zeros has scale 0; it is divided by 1 instead and stays zero.
        noise_NH.add_(rows_NH / torch.where(scale_N1 == 0, 1.0, scale_N1)).floor_().clamp_(-_STEPS, _STEPS)
        numbers.copy_(noise_NH)
        return message

    @torch.no_grad()
    def decode(self, message: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Dequantizes a uint8 message `[N · (H + 4)]` to `shape`, `[..., H]`."""
        scales, numbers = scales_and_numbers(message, math.prod(shape[:-1]), shape[-1])
        return (numbers.float() * scales).to(dtype).view(shape)


def wire_format(kind: WireKind) -> WireFormat:
    """Returns the wire format of that name; a job's are in its `ResolvedPipeline.wire`."""
    return Int8() if kind == "int8" else AsIs(torch_dtype(DTYPES[kind]))


def message_seed(*facts: int | str) -> int:
    """Returns a seed derived from what identifies a message; the same on every machine."""
    digest = hashlib.blake2b(repr(facts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


# When the sums of gradients over replicas begin on a rank: a decision about its cable.
#
# Sums leave a host through the same cable as the pipeline's messages. A stage's last gradients
# have a stage below that waits for them; its sums have time until the end of the step. So a rank
# that still sends starts no sum over replicas. The sums of a stage after which the rank sends
# nothing begin within its last backward, block by block.

_SENDS = frozenset({Computation.SEND_F, Computation.SEND_B})
_COMPUTES = frozenset(
    {Computation.FORWARD, Computation.FULL_BACKWARD, Computation.BACKWARD_INPUT, Computation.BACKWARD_WEIGHT}
)


@dataclass(frozen=True)
class SumStart:
    """When a rank's sums begin.

    Attributes:
        held: Stages whose sums wait for the rank's last message.
        last_send: Position of the action that sends it; -1 if the rank sends nothing.
        waits: Whether that message must have left before the held sums begin. Not if the rank
            still computes then: it does not stand still for its cable.
    """

    held: frozenset[int]
    last_send: int
    waits: bool


def sum_start(actions: Sequence[LoweredAction], stages: Collection[int]) -> SumStart:
    """Decides when the sums of a rank's stages begin. `actions`: the rank's actions in a step.
    `stages`: those of its stages that have sums over replicas."""
    last_send = last_compute = -1
    ends: dict[int, int] = {}
    for position, action in enumerate(actions):
        if action.computation_type in _SENDS:
            last_send = position
        elif action.computation_type in _COMPUTES:
            last_compute = ends[action.stage_index] = position
    held = frozenset(stage for stage in stages if ends.get(stage, -1) < last_send)
    return SumStart(held, last_send, waits=last_compute < last_send)
