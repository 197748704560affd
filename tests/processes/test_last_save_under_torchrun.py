"""A process of torchrun whose last save fails ends with an error, and a second start saves what the
first one left in memory."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from raypp.memory.files import DIRECTORY_VARIABLE
from raypp.observe.reader import RunReader
from raypp.ports import free_port
from raypp.storage import open_store
from raypp.train.fault_injection import VARIABLE

END_S = 200


@pytest.mark.slow
@pytest.mark.gate
def test_the_process_fails_with_the_cause_and_a_second_start_saves(tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    (tmp_path / "job.yaml").write_text(
        "name: alone\ndata: {kind: synthetic}\nmodel: {num_layers: 2, hidden_size: 32, vocab_size: 64}\n"
        f"train: {{steps: 4}}\ncheckpoint: {{url: {tmp_path}/store, every_steps: 0, memory_every_steps: 1}}\n"
    )

    def start(fault: str) -> subprocess.CompletedProcess[str]:
        here = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
        here |= {"MASTER_PORT": str(free_port()), VARIABLE: fault, DIRECTORY_VARIABLE: str(memory)}
        command = [sys.executable, "-m", "raypp.train", "--job", str(tmp_path / "job.yaml")]
        return subprocess.run(
            command, env=os.environ | here, capture_output=True, text=True, timeout=END_S, check=False
        )

    first = start("slow@forward:seconds=0.2; disk_full@upload")
    assert first.returncode == 1, first.stdout + first.stderr
    assert "the last checkpoint, of step 4, was not saved: rank 0 could not store its part" in first.stderr
    reader = RunReader(open_store(str(tmp_path / "store")), "alone")
    assert (reader.status() or {})["state"] == "FAILED"
    second = start("")
    assert second.returncode == 0, second.stdout + second.stderr
    assert (reader.status() or {})["state"] == "SUCCEEDED"
    assert re.search("restored: from memory: step [1-4] on all 1 ranks; nothing is committed", second.stdout)
    assert list(memory.iterdir()) == []
