"""What raypp sets for CUDA's libraries, and looks for in their errors, exists in these libraries.

A misspelt variable does nothing, and says nothing. No GPU is needed, only a CUDA build of torch:
these tests run in `make test-torch211` and on machines with a GPU.
"""

import mmap
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from raypp.environment import NCCL_OF_TORCH
from raypp.rank.joining.cuda_settings import _ALLOCATOR, ALLOCATOR_VARIABLES
from raypp.rank.joining.device_memory import _FULL
from raypp.rank.joining.lost_peer import _OWN_ERROR, NCCL_OWN
from raypp.stages.parallel.rank_groups import few_ctas, urgent

TORCH = Path(torch.__file__).parent / "lib"
NCCL, CUDNN = (Path(torch.__file__).parents[1] / f"nvidia/{name}/lib" for name in ("nccl", "cudnn"))

pytestmark = pytest.mark.skipif(not (TORCH / "libtorch_cuda.so").exists(), reason="this torch is no CUDA build")


def missing(library: Path, names: tuple[str, ...]) -> list[str]:
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        return [name for name in names if text.find(name.encode()) < 0]


def test_torch_reads_the_variables_that_keep_a_process_after_a_failure() -> None:
    assert missing(TORCH / "libtorch_cuda.so", tuple(NCCL_OF_TORCH)) == []


def test_torch_and_cublas_have_the_errors_that_are_recognised() -> None:
    of_cublas = tuple(text for text in _FULL if text.startswith("CUBLAS_"))
    assert of_cublas and missing(TORCH / "libtorch_cuda.so", (*_OWN_ERROR, *of_cublas)) == []


@pytest.mark.skipif(not CUDNN.exists(), reason="torch has cuDNN built in")
def test_cudnn_has_the_error_that_is_recognised() -> None:
    of_cudnn = tuple(text for text in _FULL if text.startswith("CUDNN_"))
    assert of_cudnn and missing(CUDNN / "libcudnn_graph.so.9", of_cudnn) == []


def test_torch_reads_the_variables_of_its_allocator() -> None:
    setting = _ALLOCATOR.partition(":")[0]
    assert missing(TORCH / "libc10_cuda.so", (*ALLOCATOR_VARIABLES, setting)) == []


@pytest.mark.skipif(not (NCCL / "libnccl.so.2").exists(), reason="torch has NCCL built in")
def test_nccl_reads_the_variables_of_its_sockets_and_has_the_errors_that_are_recognised() -> None:
    variables = tuple(name.removeprefix("NCCL_") for name in ("NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD"))
    forms = ("Cuda failure %d '%s'", "Cuda failure '%s'")
    allocations = tuple(text for text in _FULL if text.startswith("Failed to CUDA"))
    filled = {form.replace("%d", "2").replace("%s", "out of memory") for form in forms}
    assert filled <= set(_FULL)
    assert missing(NCCL / "libnccl.so.2", ("NCCL_SOCKET_IFNAME", "HOSTID", *variables, *forms, *allocations)) == []
    calls = tuple(row[0] for row in NCCL_OWN if row[0].startswith(("no socket", "failed to peer", "ibv_reg_mr")))
    assert len(calls) == 3 and missing(NCCL / "libnccl.so.2", calls) == []


def test_a_group_of_the_pipeline_has_few_ctas_and_can_be_aborted() -> None:
    assert (few_ctas(1).config.max_ctas, few_ctas(1).is_high_priority_stream) == (1, False)
    assert (urgent(2).config.max_ctas, urgent(2).is_high_priority_stream) == (2, True)
    assert urgent().is_high_priority_stream
    assert all(hasattr(dist.ProcessGroupNCCL, name) for name in ("abort", "get_error"))


def test_a_name_that_no_library_has_is_found() -> None:
    assert missing(TORCH / "libc10_cuda.so", ("RAYPP_NO_SUCH_NAME",)) == ["RAYPP_NO_SUCH_NAME"]
