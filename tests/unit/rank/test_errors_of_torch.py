"""The classification of torch's exceptions."""

import pytest
import torch

from raypp.errors import CheckpointError, JobError
from raypp.rank.joining.device_memory import out_of_device_memory
from raypp.rank.joining.lost_peer import LostPeerError


def after(error: Exception, cause: BaseException) -> Exception:
    error.__cause__ = cause
    return error


def test_a_full_device_is_found_below_the_errors_that_wrap_it() -> None:
    full = torch.OutOfMemoryError("CUDA out of memory")
    assert out_of_device_memory(full)
    assert out_of_device_memory(after(RuntimeError("stage 1 failed to run forward"), full))
    assert out_of_device_memory(after(CheckpointError("cannot be loaded"), full))
    assert not out_of_device_memory(RuntimeError("CUDA out of memory"))


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
        "NCCL error in: x.cpp:1, unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    ],
)
def test_a_library_that_finds_the_device_full_is_believed(text: str) -> None:
    assert out_of_device_memory(RuntimeError(text))


def test_an_error_that_declares_what_it_is_is_believed() -> None:
    full = torch.OutOfMemoryError("CUDA out of memory")
    assert not out_of_device_memory(after(LostPeerError("gone"), full))
    assert not out_of_device_memory(after(JobError("wrong"), full))
