"""The rows of a quantised matrix as bytes: how weights become bytes, and weights again.

Every row is quantised on its own. So its bytes are the same wherever the matrix is cut, a rank
quantises the rows it holds and no others, and one tensor of bytes holds everything: it is sharded,
gathered and moved like any weight.

int8, `R = C + 4` bytes: C weights as signed bytes, then the scale s in fp32. A weight is byte · s,
s the largest magnitude of the row / 127.

fp8, `R = C + 16` bytes: C weights in e4m3, the scale s in fp32, and 12 zeros. A weight is
float · s, s the largest magnitude of the row / 448.

nf4, `R = C / 2 + C / 64 + 4` bytes: C weights as indices of a table of 16 values, two in a byte,
the first in the high half; a byte k for each block of 64 weights; the step d in fp32. A weight is
table[index] · d · k². The table is QLoRA's (arXiv:2305.14314, appendix E). The scale of a block is
the largest magnitude in it, rounded to d · k² with d = the largest scale of the row / 255². The
square keeps the small scales of a row with outliers. QLoRA's second quantisation has groups of 256
scales, which cross rows (design record 0033).

Legend: M rows, C weights in a row, R bytes in a row.
"""

from functools import lru_cache

import torch
from torch import Tensor

from raypp.job.lora import BLOCK, NF4, Base, row_bytes
from raypp.stages.models import fused
from raypp.stages.models.fp8 import rows_in_fp8

_TINY = torch.finfo(torch.float32).tiny
_LARGEST = 255
_CHUNK = 1 << 20
_CHUNK_ON_CUDA = 1 << 24
"""Weights that are converted at a time; bounds the memory for intermediate results."""


def quantise_rows(matrix_MC: Tensor, base: Base) -> Tensor:
    """Quantises a matrix, or any of its rows. Returns their bytes, uint8 `[..., M, R]`, on the same
    device. Raises ValueError: a weight is not finite, or nf4 cannot store rows of C weights."""
    width = matrix_MC.shape[-1]
    flat_MC = matrix_MC.reshape(-1, width)
    out_MR = torch.empty(len(flat_MC), row_bytes(base, width), dtype=torch.uint8, device=matrix_MC.device)
    convert = {"int8": _to_int8, "fp8": _to_fp8, "nf4": _to_nf4}[base]
    step = _rows_at_a_time(flat_MC)
    for first in range(0, len(flat_MC), step):
        convert(flat_MC[first : first + step].float(), out_MR[first : first + step])
    return out_MR.view(*matrix_MC.shape[:-1], -1)


def dequantise_rows(bytes_MR: Tensor, base: Base, width: int, dtype: torch.dtype) -> Tensor:
    """Returns the weights `[..., M, C]` of quantised rows.

    They are products in fp32, then rounded to `dtype`. `bytes_MR`: uint8 `[..., M, R]`. FSDP of
    torch 2.11 gathers all weights in its compute dtype; then it is that dtype, and the values are
    the bytes.
    """
    flat_MR = bytes_MR.reshape(-1, bytes_MR.shape[-1]).to(torch.uint8)
    out_MC = torch.empty(len(flat_MR), width, dtype=dtype, device=bytes_MR.device)
    kernels = fused.kernels(out_MC.device)
    if kernels is not None and dtype != torch.float64 and base != "fp8":
        if base == "int8":
            kernels.from_int8(flat_MR, out_MC)
        else:
            kernels.from_nf4(flat_MR, out_MC, _table(out_MC.device))
        return out_MC.view(*bytes_MR.shape[:-1], width)
    convert = {"int8": _from_int8, "fp8": _from_fp8, "nf4": _from_nf4}[base]
    step = _rows_at_a_time(out_MC)
    for first in range(0, len(flat_MR), step):
        convert(flat_MR[first : first + step], out_MC[first : first + step])
    return out_MC.view(*bytes_MR.shape[:-1], width)


def _rows_at_a_time(matrix_MC: Tensor) -> int:
    return max(1, (_CHUNK_ON_CUDA if matrix_MC.is_cuda else _CHUNK) // matrix_MC.shape[1])


def _to_int8(rows_MC: Tensor, out_MR: Tensor) -> None:
    """Writes fp32 weights `[M, C]` as int8 bytes, uint8 `[M, R]`."""
    scale_M1 = _largest(rows_MC) / 127
    codes_MC = (rows_MC / scale_M1.clamp(min=_TINY)).round_().clamp_(-127, 127).to(torch.int8)
    torch.cat((codes_MC.view(torch.uint8), scale_M1.view(torch.uint8)), dim=1, out=out_MR)


def _from_int8(bytes_MR: Tensor, out_MC: Tensor) -> None:
    """Writes int8 bytes, uint8 `[M, R]`, as weights `[M, C]`."""
    width = out_MC.shape[1]
    codes_MC = bytes_MR[:, :width].view(torch.int8)
    torch.mul(codes_MC, _fp32(bytes_MR[:, width:]), out=out_MC)


def _to_fp8(rows_MC: Tensor, out_MR: Tensor) -> None:
    """Writes fp32 weights `[M, C]` as fp8 bytes, uint8 `[M, R]`."""
    rows, scales = rows_in_fp8(rows_MC)
    _check_finite(scales)
    tail = torch.zeros(len(rows), out_MR.shape[1] - rows_MC.shape[1] - 4, dtype=torch.uint8, device=out_MR.device)
    torch.cat((rows.view(torch.uint8), scales.view(torch.uint8), tail), dim=1, out=out_MR)


def _from_fp8(bytes_MR: Tensor, out_MC: Tensor) -> None:
    """Writes fp8 bytes, uint8 `[M, R]`, as weights `[M, C]`."""
    rows, scales = fp8_parts(bytes_MR, out_MC.shape[1])
    torch.mul(rows.to(torch.float32), scales, out=out_MC)


def fp8_parts(bytes_MR: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Returns the floats `[..., M, C]` of fp8 bytes, uint8 `[..., M, R]`, and their scales, fp32
    `[..., M, 1]`."""
    return bytes_MR[..., :width].view(torch.float8_e4m3fn), _fp32(bytes_MR[..., width : width + 4])


def _to_nf4(rows_MC: Tensor, out_MR: Tensor) -> None:
    """Writes fp32 weights `[M, C]` as nf4 bytes, uint8 `[M, R]`."""
    rows, width = rows_MC.shape
    blocks_MK64 = rows_MC.view(rows, -1, BLOCK)
    scales_MK = _largest(blocks_MK64).squeeze(-1)
    middles = _table(rows_MC.device).unfold(0, 2, 1).mean(1)
    codes_MC = torch.bucketize(blocks_MK64 / scales_MK.clamp(min=_TINY)[..., None], middles, out_int32=True)
    codes_MC = codes_MC.to(torch.uint8).view(rows, width)
    step_M1 = scales_MK.amax(1, keepdim=True) / _LARGEST**2
    k_MK = (scales_MK / step_M1.clamp(min=_TINY)).sqrt_().round_().clamp_(max=_LARGEST).to(torch.uint8)
    pairs = (codes_MC[:, 0::2] << 4) | codes_MC[:, 1::2]
    torch.cat((pairs, k_MK, step_M1.view(torch.uint8)), dim=1, out=out_MR)


def _from_nf4(bytes_MR: Tensor, out_MC: Tensor) -> None:
    """Writes nf4 bytes, uint8 `[M, R]`, as weights `[M, C]`."""
    rows, width = out_MC.shape
    pairs, k_MK, step = torch.split(bytes_MR, [width // 2, width // BLOCK, 4], dim=1)
    k_MK = k_MK.to(torch.float32)
    scales_MK = _fp32(step) * (k_MK * k_MK)
    both = _pair_table(bytes_MR.device).index_select(0, pairs.reshape(-1).to(torch.int32))
    values = both.view(torch.float32).view(rows, -1, BLOCK)
    torch.mul(values, scales_MK[..., None], out=out_MC.view(rows, -1, BLOCK))


def _largest(values: Tensor) -> Tensor:
    """Returns the largest magnitude of `[..., n]` along the last dim, `[..., 1]`."""
    largest = values.abs().amax(-1, keepdim=True)
    _check_finite(largest)
    return largest


def _check_finite(largest: Tensor) -> None:
    if not bool(largest.isfinite().all()):
        raise ValueError("a weight is not a finite number")


def _fp32(bytes_M4: Tensor) -> Tensor:
    """Returns the fp32 numbers `[M, 1]` of four bytes each, uint8 `[M, 4]`."""
    return bytes_M4.contiguous().view(torch.float32)


@lru_cache(maxsize=16)
def _table(device: torch.device) -> Tensor:
    """Returns the values of 4-bit NormalFloat, fp32 `[16]`."""
    return torch.tensor(NF4, dtype=torch.float32, device=device)


@lru_cache(maxsize=16)
def _pair_table(device: torch.device) -> Tensor:
    """Returns the two values of every byte, as one element of 8 bytes each: int64 `[256]`."""
    byte = torch.arange(256, device=device)
    table = _table(device)
    return torch.stack((table[byte >> 4], table[byte & 15]), dim=1).view(torch.int64).squeeze(1)
