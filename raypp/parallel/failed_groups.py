"""Finds out whether an NCCL communicator of this process has failed."""

from __future__ import annotations

import threading

import torch
import torch.distributed as dist

from raypp.torch_private import backends_on

_aborted = threading.Event()


def before_abort() -> None:
    """Makes `check_groups` raise until `before_join`: this process aborts its communicators."""
    _aborted.set()


def before_join() -> None:
    """To be called before new groups are made."""
    _aborted.clear()


def check_groups() -> None:
    """Raises if an NCCL communicator of this process has failed. Costs microseconds.

    A failed communicator is aborted: its kernels end, and later kernels compute with what was never
    received. The error is set before the abort, so if this returns, all that the device finished
    before the call is sound. To be called before results of the device are kept or sent on.

    Raises:
        DistBackendError: A communicator failed, timed out, or was aborted by this process.
    """
    if _aborted.is_set():
        raise dist.DistBackendError("this rank aborted its NCCL communicators")
    if not (torch.cuda.is_available() and dist.is_nccl_available() and dist.is_initialized()):
        return
    for backend in backends_on(torch.device("cuda")):
        if not isinstance(backend, dist.ProcessGroupNCCL):  # gloo serves CUDA, too, where ranks compute on CPUs
            continue
        error = backend.get_error()
        if error.name != "SUCCESS":
            raise dist.DistBackendError(f"an NCCL communicator of this rank failed ({error.name}); its log says why")
