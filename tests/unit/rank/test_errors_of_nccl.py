"""Whether an error of NCCL is a rank's own or the loss of a peer, and what helps, text by text."""

from typing import Any, cast

import pytest
from torch.distributed import DistBackendError

from raypp.control.worker import kind_and_cause
from raypp.failure_kinds import FailureKind
from raypp.job.load import parse_job
from raypp.planning.decide import decide
from raypp.rank import rank
from raypp.rank.joining.lost_peer import NCCL_OWN, NcclError, explained, lost_peer
from raypp.rank.own_seat import local_seat

_SYSTEM = "unhandled system error, NCCL version 2.28.9\nncclSystemError: System call or external library call failed."
_INTERNAL = "internal error, NCCL version 2.28.9\nncclInternalError: Internal check failed."
_CUDA = "unhandled cuda error, NCCL version 2.28.9\nncclUnhandledCudaError: Call to CUDA function failed."
_USAGE = "invalid usage, NCCL version 2.28.9\nncclInvalidUsage: This usually reflects invalid usage of NCCL library."
_REMOTE = "remote process exited or there was a network error\nncclRemoteError: A call failed."
_OWN = [
    (_SYSTEM, "Error while creating shared memory segment /dev/shm/nccl-1YsMbG (size 9637888)", "--shm-size"),
    (
        _SYSTEM,
        "Error: failed to extend /dev/shm/nccl-x1 to 9637892 bytes, error: No space left on device (28)",
        "SHM_DIS",
    ),
    (
        _SYSTEM,
        "Error: failed to create shared memory file /dev/shm/nccl-x1, error Read-only file system (30)",
        "--shm-size",
    ),
    (_SYSTEM, "Call to write failed: No space left on device", "/dev/shm"),
    (_INTERNAL, "Bootstrap : no socket interface found", "NCCL_SOCKET_IFNAME"),
    (_INTERNAL, "NET/Socket : No usable listening interface found", "NCCL_SOCKET_IFNAME"),
    (_INTERNAL, "NET/IB : No IP interface found.", "NCCL_SOCKET_IFNAME"),
    (_SYSTEM, "Call to ibv_reg_mr failed with error Cannot allocate memory", "ulimit -l"),
    (_SYSTEM, "Call to ibv_create_qp failed with error Cannot allocate memory", "memlock"),
    (_SYSTEM, "Call to ibv_modify_qp failed with 110 Connection timed out, on dev mlx5_0:1", "NCCL_IB_DISABLE"),
    (
        _SYSTEM,
        "Failed to bind NVLink SHARP (NVLS) Multicast memory of size 2 : CUDA error 1 'x'.\nThis is",
        "NVLS_ENABLE",
    ),
    (_CUDA, "failed to peer with device 1(=41000): 217 peer access is not supported", "NCCL_P2P_DISABLE"),
    (_SYSTEM, "Failed to CUDA host alloc 4096 bytes", "raypp plan"),
    (_CUDA, "Cuda failure 2 'out of memory'", "nvidia-smi"),
    (_SYSTEM, "Call to socket failed: Too many open files", "ulimit -n"),
    (_USAGE, "Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 41000", "its own card"),
    (_USAGE, "Multiple Ranks are using the same GPU/Partition. Set NCCL_MULTI_RANK_GPU_ENABLE=1", "its own card"),
    (_INTERNAL, "Mismatched NCCL version detected : rank 0 version 22809 rank 1 version 22705", "same torch"),
    (_CUDA, "Cuda failure 'CUDA driver version is insufficient for CUDA runtime version'", "newer driver"),
    (_CUDA, "Cuda failure 719 'unspecified launch failure'", "Xid"),
]


def error_of_nccl(kind: str, last: str) -> DistBackendError:
    return DistBackendError(f"NCCL error in: NCCLUtils.cpp:94, {kind}\nLast error:\n{last}")


@pytest.mark.parametrize(("kind", "last", "hint"), _OWN)
def test_an_own_error_is_a_failure_with_its_cause_and_fix(kind: str, last: str, hint: str) -> None:
    error = error_of_nccl(kind, last)
    assert not lost_peer(error)
    failure, cause = kind_and_cause(explained(error) or error)
    shown, fix = cause.split("\n  fix: ")
    assert failure is FailureKind.RAISED and hint in fix
    assert last.partition("\n")[0].partition("nccl-")[0] in shown


def test_every_row_of_the_table_is_tested_by_a_text_that_reaches_it() -> None:
    reached = {next(row for row in NCCL_OWN if row[0] in f"{kind}{last}") for kind, last, _ in _OWN}
    assert reached == set(NCCL_OWN)


@pytest.mark.parametrize(
    ("kind", "last"),
    [
        (_REMOTE, "socketProgress: Connection closed by remote peer 10.0.0.2<41000>"),
        (_REMOTE, "Call to ibv_modify_qp failed with 110 Connection timed out"),  # an older error's text
        (
            _SYSTEM,
            "socketPollConnect: connect to 10.0.0.2<41> returned refused, exceeded error retry count after 9 attempts",
        ),
        (_SYSTEM, "NET/IB: Got completion from peer 10.0.0.2<41> with status=IBV_WC_RETRY_EXC_ERR(12), ibv_poll_cq"),
        (_SYSTEM, "Error while attaching to shared memory segment /dev/shm/nccl-1YsMbG: No such file or directory"),
    ],
)
def test_a_remote_error_is_a_lost_peer(kind: str, last: str) -> None:
    error = error_of_nccl(kind, last)
    assert lost_peer(error) and explained(error) is None


def test_an_own_error_without_a_known_text_stays_as_it_is() -> None:
    error = DistBackendError("NCCL error: unhandled cuda error, ncclUnhandledCudaError: an illegal memory access")
    assert not lost_peer(error) and explained(error) is None


def test_two_attempts_without_shared_memory_have_the_same_cause() -> None:
    texts = [
        f"Error while creating shared memory segment /dev/shm/nccl-{name} (size 9637888)" for name in ("aB3", "Xyz")
    ]
    one, two = (str(explained(error_of_nccl(_SYSTEM, text))) for text in texts)
    assert one == two


def test_a_rank_ends_with_the_explained_error(monkeypatch: pytest.MonkeyPatch) -> None:
    error = error_of_nccl(_INTERNAL, "Bootstrap : no socket interface found")

    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(rank, "_run_attempt", fails)
    job = parse_job({"name": "x"})
    with pytest.raises(NcclError, match="NCCL_SOCKET_IFNAME") as found:
        rank.run_rank(decide(job), local_seat(0, 1, 1, job), cast(Any, None))
    assert found.value.__cause__ is error
