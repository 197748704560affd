"""torch dtypes by their names in safetensors files and in jobs."""

from __future__ import annotations

import torch

from raypp.spec.precision import FP32, Dtype

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
DTYPES = {name: dtype for dtype, name in _NAMES.items()}


def dtype_name(dtype: torch.dtype, tensor_name: str) -> str:
    """Returns the safetensors name of a dtype; raises TypeError if it has none."""
    if dtype not in _NAMES:
        raise TypeError(f"{tensor_name} has dtype {dtype}, which cannot be saved")
    return _NAMES[dtype]


def torch_dtype(dtype: Dtype) -> torch.dtype:
    """Returns the dtype of a job in torch; fp32 is torch's default dtype.

    Tests set that default to fp64, where rounding cannot hide a wrong sum.
    """
    found: torch.dtype = torch.get_default_dtype() if dtype is FP32 else getattr(torch, dtype.torch)
    return found
