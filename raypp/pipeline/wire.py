"""How activations and gradients look on their way between two ranks.

A format turns a tensor into one contiguous message of a size that both ends know from the step's plan, and back. As
computed is the default and keeps every bit. The others lose some, and are used only when the job asks for them:

- `bf16`: numbers of fp32 rounded to the nearest bf16. Half the bytes; each number within 2^-8 of itself, relatively.
- `int8`: each row (the hidden vector of one token) is divided by its scale, its largest magnitude / 127, and rounded
  stochastically, up with the probability of the fraction: the mean of what arrives is what was sent, so errors do not
  add up over microbatches in one direction. A quarter of fp32's bytes and 4 more per row; each number within one
  scale. The random numbers are a function of what is sent (seed, step, stage, microbatch), so a run that was
  restarted repeats them.
"""

from __future__ import annotations

import hashlib
from typing import Protocol

import torch
from torch import Tensor

from raypp.planning.choices import WireKind

_STEPS = 127
"""Largest magnitude of an int8 message: symmetric, so that zero stays zero."""


class WireFormat(Protocol):
    """One way for a tensor to travel."""

    name: str
    unwritten: int
    """Fills the bytes of the last number of a receive buffer: a number that no message ends with."""

    def buffer(self, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """Room for the message of a tensor of that shape."""
        ...

    def encode(self, tensor: Tensor, seed: int) -> Tensor:
        """The message, contiguous, of the buffer's size and dtype.

        Args:
            tensor: `[..., H]`, in the compute dtype.
            seed: Of the random numbers, when the format draws any.
        """
        ...

    def decode(self, message: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The tensor of that shape and dtype that the other end gets; may be the message itself."""
        ...


class AsIs:
    """In a dtype of torch's: the compute dtype (no bit is lost), or a narrower one (rounded to nearest)."""

    unwritten = 0x5A  # 0x5A5A5A5A as a float is 1.5e16, which no layer gives

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.name = str(dtype).removeprefix("torch.")

    def buffer(self, shape: tuple[int, ...], device: torch.device) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=device)

    def encode(self, tensor: Tensor, seed: int) -> Tensor:
        return tensor.to(self.dtype).contiguous()

    def decode(self, message: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return message.to(dtype)


class Int8:
    """Bytes with a fp32 scale per row. Something that is not finite makes its row not finite at the other end."""

    name = "int8"
    unwritten = 0x80  # -128

    def buffer(self, shape: tuple[int, ...], device: torch.device) -> Tensor:
        rows = _rows(shape)
        return torch.empty(rows * (shape[-1] + 4), dtype=torch.uint8, device=device)

    @torch.no_grad()
    def encode(self, tensor: Tensor, seed: int) -> Tensor:
        rows_NH = tensor.reshape(-1, tensor.shape[-1]).float()
        scale_N1 = rows_NH.abs().amax(dim=1, keepdim=True) / _STEPS
        message = self.buffer(tuple(tensor.shape), tensor.device)
        scales, numbers = _parts(message, *rows_NH.shape)
        scales.copy_(scale_N1)
        noise = torch.Generator(tensor.device).manual_seed(seed)
        noise_NH = torch.rand(rows_NH.shape, generator=noise, device=tensor.device)
        # A row of zeros has the scale 0; dividing by 1 instead keeps it.
        noise_NH.add_(rows_NH / torch.where(scale_N1 == 0, 1.0, scale_N1)).floor_().clamp_(-_STEPS, _STEPS)
        numbers.copy_(noise_NH)
        return message

    @torch.no_grad()
    def decode(self, message: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        scales, numbers = _parts(message, _rows(shape), shape[-1])
        return (numbers.float() * scales).to(dtype).view(shape)


def _rows(shape: tuple[int, ...]) -> int:
    count = 1
    for length in shape[:-1]:
        count *= length
    return count


def _parts(message: Tensor, rows: int, width: int) -> tuple[Tensor, Tensor]:
    """The scales `[N, 1]` and the numbers `[N, H]` of a message, as views of it."""
    scales = message[: 4 * rows].view(torch.float32).view(rows, 1)
    return scales, message[4 * rows :].view(torch.int8).view(rows, width)


def wire_format(kind: WireKind) -> WireFormat:
    """The format of that name; a job's are in its `ResolvedPipeline.wire`.

    What a job calls fp32 is torch's default dtype, as in `parallel.apply.compute_dtype`.
    """
    if kind == "int8":
        return Int8()
    return AsIs(torch.bfloat16 if kind == "bf16" else torch.get_default_dtype())


def message_seed(*facts: int | str) -> int:
    """A seed made of whatever tells one message from another; the same on every machine."""
    digest = hashlib.blake2b(repr(facts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
