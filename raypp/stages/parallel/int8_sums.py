"""Sums over replicas in 8 or 4 bits, with error feedback: of gradients, or changes of weights.

Each replica sends its gradient as int8 numbers, one fp32 scale per block of `BLOCK` numbers, and
adds up what all replicas sent, in their order. So all replicas get the same bits. What rounding
took away from a replica's gradient is its residual: the replica adds it to its gradient in the next
step. Nothing is lost, it only arrives later: over many steps, the sums of what was delivered and of
the gradients differ by the last residuals alone.

Legend: N numbers of a flat gradient, K blocks of them, R replicas.
"""

from __future__ import annotations

import torch
from torch import Tensor

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
