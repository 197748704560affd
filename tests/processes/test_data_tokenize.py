"""Tests `raypp data tokenize` as a command: several processes, and a kill in the middle."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from raypp.data.loader import open_loader
from raypp.spec.job import Job

JOB = """
name: shards
model: {vocab_size: 320}
data: {kind: text, path: source.txt}
"""


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "job.yaml").write_text(JOB)
    with (tmp_path / "source.txt").open("w") as file:
        for number in range(450_000):
            file.write(f"paragraph {number} of a text that takes a while to tokenise, in a process or in several\n\n")
    monkeypatch.setenv("RAYPP_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path


def command(room: Path, *more: str) -> subprocess.Popen[str]:
    words = ["data", "tokenize", "job.yaml", "--out", "out", "--processes", "2", *more]
    return subprocess.Popen(
        [sys.executable, "-m", "raypp", *words], cwd=room, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def rows(kind: str, path: Path) -> list[Any]:
    data = {"kind": kind, "path": str(path)}
    loader = open_loader(Job.model_validate({"name": "rows", "model": {"vocab_size": 320}, "data": data}), 0, 1)
    steps = [loader.next_step() for _ in range(3)]
    loader.close()
    return [row.tokens.tolist() for step in steps for microbatch in step for row in microbatch.rows]


def test_a_killed_command_goes_on_and_leaves_no_process(room: Path) -> None:
    first = command(room)
    deadline = time.monotonic() + 120
    while not (room / "out" / "shard-000000.json").exists():
        assert first.poll() is None and time.monotonic() < deadline, first.communicate()
        time.sleep(0.05)
    helpers = psutil.Process(first.pid).children(recursive=True)
    os.kill(first.pid, signal.SIGKILL)
    first.communicate()
    assert not (room / "out" / "tokens.json").exists()
    assert not psutil.wait_procs(helpers, timeout=60)[1]
    second = command(room, "--json")
    said, told = second.communicate(timeout=240)
    assert second.returncode == 0, told
    assert "shards are there already; goes on after them" in told
    assert json.loads(said)["documents"] == 450_000
    assert rows("tokens", room / "out") == rows("text", room / "source.txt")


def test_an_error_of_another_process_names_the_place(room: Path) -> None:
    (room / "job.yaml").write_text(JOB.replace("kind: text", "kind: jsonl").replace("source.txt", "lines.jsonl"))
    (room / "lines.jsonl").write_text('{"text": "one"}\n{"text": ""}\n')
    running = command(room)
    _, told = running.communicate(timeout=120)
    assert running.returncode == 2 and "lines.jsonl:2 is a document without a token" in told
