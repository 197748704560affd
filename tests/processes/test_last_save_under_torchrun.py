"""A process of torchrun whose last save fails ends with an error; a second start saves it."""

import os
import re
import subprocess
from pathlib import Path

import pytest
from programs import run_python

from raypp.ports import free_port
from raypp.rank.fault_injection import VARIABLE
from raypp.state.memory.files import DIRECTORY_VARIABLE
from raypp.state.run_records.reader import RunReader
from raypp.storage import open_store

END_S = 200


@pytest.mark.gate
def test_the_process_fails_with_the_cause_and_a_second_start_saves(tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    (tmp_path / "job.yaml").write_text(
        "name: alone\ndata: {kind: synthetic}\nmodel: {num_layers: 2, hidden_size: 32, vocab_size: 64}\n"
        f"train: {{steps: 4}}\ncheckpoint: {{url: {tmp_path}/store, every_steps: 0, memory_every_steps: 1}}\n"
    )

    def start(fault: str, code: int) -> subprocess.CompletedProcess[str]:
        here = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
        here |= {"MASTER_PORT": str(free_port()), VARIABLE: fault, DIRECTORY_VARIABLE: str(memory)}
        command = ("-m", "raypp.rank", "--job", str(tmp_path / "job.yaml"))
        return run_python(*command, code=code, env=os.environ | here, timeout=END_S)

    first = start("slow@forward:seconds=0.2; disk_full@upload", 1)
    assert "the last checkpoint, of step 4, was not saved: rank 0 could not store its part" in first.stderr
    reader = RunReader(open_store(str(tmp_path / "store")), "alone")
    assert (reader.status() or {})["state"] == "FAILED"
    second = start("", 0)
    assert (reader.status() or {})["state"] == "SUCCEEDED"
    assert re.search("restored: from memory: step [1-4] on all 1 ranks; nothing is committed", second.stdout)
    assert list(memory.iterdir()) == []
