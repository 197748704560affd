"""Tests that a failed rank tells what happened, its peer comes free, and both train on afterwards.

By NCCL on a GPU, else by gloo. The worker process of a run does what `_live` does here.
"""

import gc
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from collecting_reporter import CollectingReporter
from ranks import DEVICE, run_on_one_device

from raypp.job.load import parse_job
from raypp.planning.decide import decide
from raypp.planning.decision import Facts
from raypp.ports import free_ports
from raypp.rank.fault_injection import VARIABLE
from raypp.rank.joining.abort import cut_connections
from raypp.rank.own_seat import local_seat
from raypp.rank.rank import run_rank

pytestmark = pytest.mark.timeout(240)

STEPS = 4
HANGS_S = 80.0


def document(root: Path, **sections: Any) -> dict[str, Any]:
    return {
        "name": "fails",
        "model": {"kind": "llama", "num_layers": 4, "hidden_size": 64, "num_heads": 2, "vocab_size": 64},
        "data": {"kind": "synthetic", "num_documents": 50, "seq_len": 32},
        "mesh": {"pp": 2},
        "pipeline": {"microbatches": 4},
        "train": {"steps": STEPS, "precision": "fp32", "compile": False},
        "checkpoint": {"url": str(root), "every_steps": 2},
        **sections,
    }


def _live(
    rank: int, world: int, _port: int, root: str, job: dict[str, Any], ports: list[int], fault: str
) -> dict[str, Any]:
    """Takes one seat per port. When a rank has failed in the first one, the other must leave it."""
    os.environ[VARIABLE] = fault
    ends: list[Any] = []
    for attempt, port in enumerate(ports, start=1):
        over = Path(root) / f"failed-{attempt}"
        seat = local_seat(rank, world, port, parse_job(job), attempt=attempt, device=DEVICE)
        thread = threading.Thread(target=_run, args=(job, seat, ends, over))
        thread.start()
        while thread.is_alive() and not over.exists():
            thread.join(0.02)
        reported = time.monotonic()
        while thread.is_alive() and time.monotonic() - reported < HANGS_S:
            cut_connections(port)
            thread.join(0.05)
        assert not thread.is_alive(), "a rank hangs"
        gc.collect()
    return {"ends": ends, "threads": [one.name for one in threading.enumerate()]}


def _run(job: dict[str, Any], seat: Any, ends: list[Any], over: Path) -> None:
    try:
        result = run_rank(decide(parse_job(job), Facts("cuda")), seat, CollectingReporter())
        ends.append(result.step)
    except BaseException as error:  # noqa: BLE001 - the test reads it
        ends.append(f"{type(error).__name__}: {error}")
        over.touch()


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("oom@forward:rank=1,step=2,attempt=1", "DeviceMemoryError: out of device memory: OutOfMemory"),
        ("oom@backward:rank=0,step=1,attempt=1", "DeviceMemoryError: out of device memory: OutOfMemory"),
        ("raise@optimizer:rank=1,step=2,attempt=1", "RuntimeError: injected at optimizer"),
    ],
)
def test_the_rank_that_failed_reports_why_its_peer_comes_free_and_both_train_on(
    tmp_path: Path, fault: str, error: str
) -> None:
    results = run_on_one_device(2, _live, str(tmp_path), document(tmp_path), free_ports(2), fault)
    failed = int(fault.partition("rank=")[2][0])
    assert results[failed]["ends"][0].startswith(error), results
    assert results[1 - failed]["ends"][0].startswith("LostPeerError: "), results
    for result in results:
        assert result["ends"][1] == STEPS, "the same processes train on in the next attempt"
        assert not [name for name in result["threads"] if name.startswith("raypp-")]


@pytest.mark.gpu
def test_a_device_that_is_really_full_says_what_held_it(tmp_path: Path) -> None:
    job = document(
        tmp_path,
        model={"kind": "llama", "num_layers": 4, "hidden_size": 512, "num_heads": 8, "vocab_size": 32000},
        data={"kind": "synthetic", "num_documents": 2000, "seq_len": 1024},
        train={"steps": STEPS, "precision": "fp32", "compile": False, "micro_batch_size": 16},
    )
    results = run_on_one_device(2, _with_little_memory, str(tmp_path), job, free_ports(1))
    reported = results[1]["ends"][0]
    assert reported.startswith("DeviceMemoryError: out of device memory: OutOfMemoryError: CUDA out of")
    for words in ("torch holds", "at the peak: weights", "largest blocks: ", "planned: "):
        assert words in reported
    assert results[0]["ends"][0].startswith("LostPeerError: ")


def _with_little_memory(rank: int, world: int, port: int, root: str, job: dict[str, Any], ports: list[int]) -> Any:
    if rank == 1:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((300 << 20) / total, 0)
    return _live(rank, world, port, root, job, ports, "")
