"""What torch's exceptions mean: another rank went away, or the device's memory is not enough."""

from __future__ import annotations

import torch
import torch.distributed as dist

from raypp.errors import RayppError, causes
from raypp.failure_kinds import FailureKind

# What gloo, NCCL and the key-value store say when the other side is gone or silent.
_PEER_GONE = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "socket timeout",
    "timed out waiting",
    "application timeout caused pair closure",
    "read error",
    "write error",
    "failed to recv",
    "gloo/transport",
)


class LostPeerError(RayppError):
    """Another rank went away; this one is only a witness."""

    failure_kind = FailureKind.LOST_PEER


class DeviceMemoryError(RayppError):
    """The memory of this rank's device is not enough."""

    failure_kind = FailureKind.OUT_OF_MEMORY


def lost_peer(error: BaseException) -> bool:
    """Whether an error says that a peer is gone, rather than that this rank did something wrong."""
    if isinstance(error, (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(sign in text for sign in _PEER_GONE)


def out_of_device_memory(error: BaseException) -> bool:
    """Whether torch found no room on the device. An error that declares a kind of its own is believed."""
    if isinstance(error, RayppError) and error.failure_kind is not None:
        return False
    return any(isinstance(cause, torch.OutOfMemoryError) for cause in causes(error))
