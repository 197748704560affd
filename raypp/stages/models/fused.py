"""Says whether this process can run the kernels of `triton_kernels` on a device, and gives them."""

import importlib.util
from functools import lru_cache
from types import ModuleType

import torch

from raypp.errors import in_words


def kernels(device: torch.device) -> ModuleType | None:
    """Returns `triton_kernels` if they run on a device; None: use torch. The bits are the same."""
    return _found(device)[0]


def reason_against(device: torch.device) -> str | None:
    """Returns why the kernels do not run on a device, None if they do."""
    return _found(device)[1]


@lru_cache(maxsize=16)
def _found(device: torch.device) -> tuple[ModuleType | None, str | None]:
    """Loads the kernels and runs one: Triton needs a C compiler and Python's headers."""
    if device.type != "cuda":
        return None, f"they need CUDA, this is {device.type}"
    if importlib.util.find_spec("triton") is None:
        return None, "triton is not installed"
    try:
        from raypp.stages.models import triton_kernels

        byte = torch.zeros(1, 4 + 4, dtype=torch.uint8, device=device)
        triton_kernels.from_int8(byte, torch.empty(1, 4, device=device))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - of Triton, the compiler or the driver: torch computes the same
        return None, in_words(error)
    return triton_kernels, None
