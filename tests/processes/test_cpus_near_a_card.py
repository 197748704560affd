"""A rank on CUDA (the card is made up) runs on the CPUs that sysfs lists for its card."""

import json
import os
from pathlib import Path

import pytest
from programs import run_python

_RANK = """
import functools, json, os, sys, threading
from pathlib import Path
import torch
from raypp.job.load import parse_job
from raypp.planning.decide import decide
from raypp.planning.decision import Facts
from raypp.rank import assemble
from raypp.rank.device_check import Card
from raypp.rank.own_seat import local_seat

assemble.bind_near = functools.partial(assemble.bind_near, devices=Path(sys.argv[1]))
assemble.check_device = lambda decision, seat: Card("H100", (9, 0), 80 << 30, "0000:1b:00.0")
assemble.pick_device = lambda seat: torch.device("cuda", 0)
assemble.fused.reason_against = lambda device: None
assemble.check_allocator = lambda allocator, allocate: allocator
job, events, seen = parse_job({"name": "bound"}), [], []

def rank():
    assemble.open_device(decide(job, Facts("cuda")), local_seat(0, 1, 1, job, device="cuda"), events.append)
    started = threading.Thread(target=lambda: seen.append(sorted(os.sched_getaffinity(0))))
    started.start()
    started.join()
    seen.append(sorted(os.sched_getaffinity(0)))

for _ in range(2):  # the rank of each attempt is a thread of the same process
    thread = threading.Thread(target=rank)
    thread.start()
    thread.join()
print(json.dumps({"seen": seen, "messages": [event.message for event in events], "cpus": events[0].details["cpus"]}))
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_a_rank_and_its_threads_run_next_to_their_card_in_every_attempt(tmp_path: Path) -> None:
    *others, near = sorted(os.sched_getaffinity(0))
    (tmp_path / "0000:1b:00.0").mkdir()
    (tmp_path / "0000:1b:00.0/local_cpulist").write_text(f"{near},4000-4095\n")
    answer = json.loads(run_python("-c", _RANK, str(tmp_path)).stdout)
    assert answer["seen"] == 4 * [[near]]
    words = f"1 of its {len(others) + 1} CPUs, those next to the card ({near},4000-4095)"
    assert answer["cpus"] == words and all(message.endswith(f"; {words}") for message in answer["messages"])
