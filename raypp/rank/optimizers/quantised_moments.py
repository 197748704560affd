"""Moments of AdamW in 8 bits, quantised block by block.

Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (arXiv:2110.02861): a block of
values is divided by its largest magnitude; each quotient becomes the index of the nearest of 256
numbers, which are spread over seven decades (dynamic tree quantisation).

Two things differ. A block is up to 256 neighbouring values of one row, so no rank's rows cut a
block, and the codes do not depend on the mesh. And the second moment is kept as its root, rounded
to at least the smallest number above zero: its quotient with the first moment, which is what an
update consists of, stays bounded.

Legend: R rows, L columns, N blocks of a row, B values of a block.
"""

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 256
"""Largest number of values in a block."""
_DECADES = 7


def blocks_of(columns: int) -> int:
    """Returns the number of blocks in a row of so many columns."""
    return -(-columns // BLOCK)


@lru_cache(maxsize=16)
def code_values(signed: bool, device: torch.device) -> Tensor:
    """Returns the numbers of the codes, ascending: fp32 `[256]`. The i-th of seven decades, from
    1e-7 to 1, has 2^i equally spaced numbers (unsigned: twice as many); also zero and one."""
    levels = [0.0, 1.0]
    for decade in range(_DECADES):
        count = 2**decade * (1 if signed else 2)
        top = 10.0 ** (decade - _DECADES + 1)
        for index in range(count):
            middle = 0.1 + 0.9 * (index + 0.5) / count
            levels += [top * middle, -top * middle] if signed else [top * middle]
    return torch.tensor(sorted(levels), dtype=torch.float64).to(torch.float32).to(device, non_blocking=True)


@lru_cache(maxsize=16)
def _borders(signed: bool, device: torch.device) -> Tensor:
    """Returns the middles between neighbouring codes' numbers, and infinity: fp32 `[256]`."""
    values = code_values(signed, torch.device("cpu")).double()
    middles = ((values[1:] + values[:-1]) / 2).to(torch.float32)
    return torch.cat((middles, torch.tensor([torch.inf]))).to(device, non_blocking=True)


@lru_cache(maxsize=16)
def _lowest_codes(signed: bool, device: torch.device) -> Tensor:
    """Returns the code of the lowest fp32 number with given upper 16 bits, int64 `[65536]`."""
    upper = torch.arange(1 << 16, dtype=torch.int64) << 16
    lowest = torch.where(upper >= 1 << 31, upper - (1 << 32) + 0xFFFF, upper).to(torch.int32).view(torch.float32)
    return torch.bucketize(lowest, _borders(signed, torch.device("cpu"))[:-1]).to(device, non_blocking=True)


@lru_cache(maxsize=16)
def tables(device: torch.device) -> tuple[Tensor, ...]:
    """Returns the tables of `triton_kernels.adamw`: for the signed first and the second moment, the
    numbers fp32 `[256]`, their borders fp32 `[256]`, and the lowest codes uint8 `[65536]`."""
    return tuple(
        table
        for signed in (True, False)
        for table in (
            code_values(signed, device), _borders(signed, device), _lowest_codes(signed, device).to(torch.uint8)
        )
    )  # fmt: skip


def _nearest_codes(values: Tensor, *, signed: bool) -> Tensor:
    """Returns the codes int64 `[...]` of numbers from -1 to 1, fp32 `[...]`. The upper 16 bits of a
    number leave at most two codes. Several times faster than a search."""
    upper = (values.view(torch.int32) >> 16).bitwise_and_(0xFFFF).flatten().to(torch.int64)
    codes = torch.index_select(_lowest_codes(signed, values.device), 0, upper)
    borders = torch.index_select(_borders(signed, values.device), 0, codes)
    return codes.add_(values.flatten() > borders).view(values.shape)


def quantise(values_RL: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Quantises rows. `values_RL`: fp32 `[R, L]`; not negative unless `signed`. `signed`: which of
    the two sets of numbers. Unsigned, no value becomes zero unless its whole block is. Returns
    codes, uint8 `[R, L]`, and the largest magnitude of each block, fp32 `[R, N]`."""
    blocks_RNB = _blocks(values_RL)
    scales_RN = blocks_RNB.abs().amax(-1)
    divisor = torch.where(scales_RN > 0, scales_RN, 1.0).unsqueeze(-1)
    codes = _nearest_codes(blocks_RNB / divisor, signed=signed)
    if not signed:
        codes.clamp_(min=1)
    return codes.to(torch.uint8).flatten(1)[:, : values_RL.shape[1]], scales_RN


def dequantise(codes_RL: Tensor, scales_RN: Tensor, *, signed: bool) -> Tensor:
    """Returns the values fp32 `[R, L]` of codes and scales, see `quantise`."""
    numbers = code_values(signed, codes_RL.device)
    values = torch.index_select(numbers, 0, codes_RL.reshape(-1).to(torch.int64)).view(codes_RL.shape)
    return (_blocks(values) * scales_RN.unsqueeze(-1)).flatten(1)[:, : codes_RL.shape[1]]


def _blocks(values_RL: Tensor) -> Tensor:
    """Views rows `[R, L]` as blocks `[R, N, B]`; the last one is padded with zeros."""
    rows, columns = values_RL.shape
    count = blocks_of(columns)
    size = min(BLOCK, columns)
    if count * size != columns:
        values_RL = F.pad(values_RL, (0, count * size - columns))
    return values_RL.view(rows, count, size)
