"""Recognises that a device is out of memory."""

from __future__ import annotations

import torch

from raypp.errors import RayppError, causes
from raypp.failure_kinds import FailureKind


class DeviceMemoryError(RayppError):
    """This rank's device is out of memory."""

    failure_kind = FailureKind.OUT_OF_MEMORY


def out_of_device_memory(error: BaseException) -> bool:
    """Whether torch ran out of device memory. An error that declares another kind keeps it."""
    if isinstance(error, RayppError) and error.failure_kind is not None:
        return False
    return any(isinstance(cause, torch.OutOfMemoryError) for cause in causes(error))
