"""Telling that a device's memory is not enough from torch's other errors."""

from __future__ import annotations

import torch

from raypp.errors import RayppError, causes
from raypp.failure_kinds import FailureKind


class DeviceMemoryError(RayppError):
    """The memory of this rank's device is not enough."""

    failure_kind = FailureKind.OUT_OF_MEMORY


def out_of_device_memory(error: BaseException) -> bool:
    """Whether torch found no room on the device. An error that declares a kind of its own is believed."""
    if isinstance(error, RayppError) and error.failure_kind is not None:
        return False
    return any(isinstance(cause, torch.OutOfMemoryError) for cause in causes(error))
