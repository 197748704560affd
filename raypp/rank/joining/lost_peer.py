"""Distinguishes a rank's own error from one that the death of another rank caused."""

import re

import torch.distributed as dist

from raypp.errors import Problem, RayppError
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

# What NCCL says when it is the peer, or the network up to it, that fails.
NCCL_REMOTE = (
    "ncclRemoteError",
    "remote process exited",
    "Connection closed by remote peer",
    "exceeded error retry count",
    "Got completion from peer",
)

_SHM = (
    "start the container with --shm-size=8g, delete what dead processes left in /dev/shm, or set NCCL_SHM_DISABLE=1 in "
    "resources.env"
)
_IB = "set NCCL_IB_DISABLE=1 in resources.env, which makes NCCL use TCP"
_IFNAME = "set NCCL_SOCKET_IFNAME in resources.env to an interface that is up on this node (`ip -br address`)"
_MEMLOCK = f"raise the limit (`ulimit -l unlimited`; Docker: --ulimit memlock=-1), or {_IB}"
_MEMORY = "end what else uses this card (nvidia-smi), or let the job use less of it (`raypp plan`)"

_P2P = "set NCCL_P2P_DISABLE=1 in resources.env"
_OWN_CARD = "give each rank its own card: fewer ranks a node, or a CUDA_VISIBLE_DEVICES without duplicates"
_SAME_TORCH = "install the same torch on every node (`raypp doctor` lists them)"
_DRIVER = "install a newer driver, or a torch built for an older CUDA"
_XID = "look for `Xid` in `dmesg` on this node, and at `nvidia-smi -q`; restart the node if the card is gone"

_ROWS = (
    (
        "this node has too little shared memory (/dev/shm)", _SHM,
        "creating shared memory segment", "failed to extend /dev/shm",
    ),
    ("this node has no usable shared memory (/dev/shm)", _SHM, "failed to create shared memory file"),
    ("a file system of this node is full, in a container mostly /dev/shm", _SHM, "No space left"),
    (
        "NCCL finds no network interface on this node", _IFNAME,
        "no socket interface found", "No usable listening interface", "No IP interface found",
    ),
    ("NCCL may not lock memory for InfiniBand or RoCE", _MEMLOCK, "ibv_reg_mr", "ibv_create_"),
    ("InfiniBand or RoCE does not work on this node, though it has such a port", _IB, "ibv_"),
    ("the switch of this node's NVLink refuses multicast", "set NCCL_NVLS_ENABLE=0 in resources.env", "NVLink SHARP"),
    ("this card cannot read another card's memory", _P2P, "failed to peer with device"),
    ("NCCL finds no memory for its buffers on this card", _MEMORY, "Failed to CUDA", "out of memory"),
    ("this process may not open more files", "raise the limit: `ulimit -n 65536`", "Too many open files"),
    ("two ranks of this node have the same card", _OWN_CARD, "Duplicate GPU", "Multiple Ranks are using the same GPU"),
    ("the nodes have different versions of NCCL", _SAME_TORCH, "Mismatched NCCL version"),
    ("this node's GPU driver is too old for this build of torch", _DRIVER, "driver version is insufficient"),
    ("CUDA failed on this card", _XID, "Cuda failure"),
)  # fmt: skip
NCCL_OWN = tuple((text, cause, fix) for cause, fix, *texts in _ROWS for text in texts)
"""NCCL's texts for errors of this rank, its card or its node: part of the text, cause, fix. The
first that fits counts."""


class LostPeerError(RayppError):
    """Another rank died or became unreachable; this rank is not the cause."""

    failure_kind = FailureKind.LOST_PEER


class NcclError(RayppError):
    """NCCL failed because of this rank's own card, node or settings; says what helps."""

    failure_kind = FailureKind.RAISED


def origin(error: BaseException) -> BaseException:
    """Returns what torch's runtime of pipelines wraps, with all arguments, if a forward fails."""
    while type(error) is RuntimeError and error.__cause__ is not None:
        error = error.__cause__
    return error


def lost_peer(error: BaseException) -> bool:
    """Whether an error means that a peer is gone, rather than that this rank failed."""
    error = origin(error)
    if isinstance(error, (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)):
        return _own_sign(error) is None and not any(name in str(error) for name in _OWN_ERROR)
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(sign in text for sign in _PEER_GONE)


def explained(error: BaseException) -> NcclError | None:
    """Returns an error of NCCL that is this rank's own with its cause and fix; else None. Not the
    error itself: a variable of the catching frame would keep it, and the attempt's groups."""
    error = origin(error)
    own = _own_sign(error)
    if own is None:
        return None
    _, cause, fix = own
    last = str(error).rpartition("Last error:")[2].strip().partition("\n")[0]
    last = re.sub(r"nccl-\w+", "nccl-*", last)  # so that the texts of two attempts are the same
    return NcclError(Problem("nccl", f"{cause}: {last}", fix))


def _own_sign(error: BaseException) -> tuple[str, str, str] | None:
    """Returns the row of NCCL's texts that shows an error to be this rank's own."""
    text = str(error)
    if not isinstance(error, dist.DistBackendError) or any(sign in text for sign in NCCL_REMOTE):
        return None
    return next((row for row in NCCL_OWN if row[0] in text), None)
