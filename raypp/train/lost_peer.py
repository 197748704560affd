"""Distinguishes a rank's own error from one that the death of another rank caused."""

from __future__ import annotations

import torch.distributed as dist

from raypp.errors import RayppError
from raypp.failure_kinds import FailureKind

# Messages of gloo, NCCL and the key-value store for a peer that is gone or does not answer.
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


# NCCL's names of errors that are this rank's own.
_OWN_ERROR = ("ncclUnhandledCudaError", "ncclInvalidArgument", "ncclInvalidUsage")


class LostPeerError(RayppError):
    """Another rank died or became unreachable; this rank is not the cause."""

    failure_kind = FailureKind.LOST_PEER


def lost_peer(error: BaseException) -> bool:
    """Whether an error means that a peer is gone, rather than that this rank failed."""
    if isinstance(error, (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)):
        return not any(name in str(error) for name in _OWN_ERROR)
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(sign in text for sign in _PEER_GONE)
