"""torch dtypes by their safetensors names."""

from __future__ import annotations

import torch

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
