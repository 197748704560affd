"""What is said when a device is out of memory."""

import pytest
import torch

from raypp.failure_kinds import FailureKind
from raypp.job.job import Job
from raypp.job.load import parse_job
from raypp.planning.decide import decide
from raypp.planning.memory import rank_memories
from raypp.rank.joining.device_memory import (
    DeviceTakenError,
    device_memory_error,
    holders_in_words,
    memory_lines,
    out_of_device_memory,
    taken,
)
from raypp.rank.joining.lost_peer import lost_peer
from raypp.rank.own_seat import local_seat

GIB = 1 << 30
STATS = {
    "total": 80 * GIB,
    "free": GIB // 2,
    "allocated": 60 * GIB,
    "peak": 76 * GIB,
    "reserved": 77 * GIB,
    "retries": 3,
    "blocks": [GIB, 4 * GIB, 2 * GIB, 100, 200 << 20, 300 << 20],
}


def job() -> Job:
    return parse_job(
        {
            "name": "full",
            "model": {"num_layers": 8, "hidden_size": 1024, "num_heads": 8, "ffn_size": 2752, "vocab_size": 32000},
            "data": {"kind": "synthetic", "seq_len": 2048},
            "mesh": {"pp": 2},
            "train": {"micro_batch_size": 8},
        }
    )


def test_the_text_says_what_held_the_memory() -> None:
    lines = memory_lines(STATS, {"weights": 9 * GIB, "gradients": 9 * GIB, "optimizer state": 18 * GIB})
    assert lines == [
        "of 80 GiB, 512 MiB are free; torch holds 77 GiB, CUDA, NCCL and other processes 2.5 GiB",
        "tensors: 60 GiB at the end, 76 GiB at the peak: weights 9 GiB, gradients 9 GiB, "
        "optimizer state 18 GiB, everything else (activations, logits, gathered weights) 40 GiB",
        "17 GiB are reserved but in no tensor (3 retries): fragmented; "
        "PYTORCH_ALLOC_CONF=expandable_segments:True in resources.env may help",
        "largest blocks: 4 GiB, 2 GiB, 1 GiB, 300 MiB, 200 MiB",
    ]


def test_a_rank_says_its_kind_and_needs_no_statistics() -> None:
    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    stage = torch.nn.Linear(1024, 1024, bias=False)
    error = device_memory_error(
        full, decide(job()), local_seat(1, 2, 1234, job()), [stage], torch.optim.AdamW(stage.parameters())
    )
    first, *rest = str(error).splitlines()
    assert first == ("out of device memory: OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
    assert rest[0].startswith("torch has no statistics") and rest[1].startswith("planned: ")
    assert error.failure_kind is FailureKind.DEVICE_OUT_OF_MEMORY


@pytest.mark.parametrize(
    "text",
    [
        "Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'",
        "CUDA error: out of memory",
        "Last error:\nFailed to CUDA calloc async 4194304 bytes",
    ],
)
def test_libraries_that_find_no_memory_are_no_lost_peer(text: str) -> None:
    error = torch.distributed.DistBackendError(f"NCCL error: unhandled cuda error, ncclUnhandledCudaError: {text}")
    assert out_of_device_memory(error) and not lost_peer(error)


LISTED = """GPU-aa-1, 7, python3, 20480
GPU-aa-1, 8, [Not Found], [N/A]
GPU-bb-2, 9, python3, 512
"""


def test_the_processes_of_a_card_are_named_without_this_one() -> None:
    assert holders_in_words(LISTED, "aa-1", own=1) == "held by python3 (pid 7) 20 GiB, [Not Found] (pid 8)"
    assert holders_in_words(LISTED, "aa-1", own=7) == "held by [Not Found] (pid 8)"
    for listed, uuid in ((LISTED, "bb-2"), (LISTED, ""), ("", "aa-1"), ("No devices were found", "aa-1")):
        assert "does not show here by whom" in holders_in_words(listed, uuid, own=9)


def test_memory_beside_torch_and_plan_belongs_to_others() -> None:
    planned = rank_memories(job())[0]
    stats = {"total": 80 << 30, "free": 1 << 30, "reserved": 60 << 30}
    assert taken(stats, planned) == (19 << 30) - planned.runtime and taken({}, planned) == 0


def test_a_card_that_others_fill_is_no_failure_that_recurs() -> None:
    traits = DeviceTakenError.failure_kind.traits
    assert traits.counts and not traits.recurring and not traits.permanent
