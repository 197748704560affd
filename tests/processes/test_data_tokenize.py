"""Tests `raypp data tokenize` as a command: several processes, and a kill in the middle."""

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
import yaml
from programs import run_python

from raypp.job.job import Job
from raypp.job.job_file import load_job
from raypp.rank.data.loader import open_loader
from raypp.rank.data.sources import open_documents

DOCUMENTS = 110_000
JOB = """
name: shards
model: {vocab_size: 320}
data: {kind: text, path: source.txt}
"""


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "job.yaml").write_text(JOB)
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


@pytest.mark.gate
def test_a_killed_command_goes_on_and_leaves_no_process(room: Path) -> None:
    with (room / "source.txt").open("w") as file:  # enough for three shards
        words = "of a text that takes a while to tokenise, in a process or in several, " * 6
        file.writelines(f"paragraph {number} {words}\n\n" for number in range(DOCUMENTS))
    first = command(room)
    deadline = time.monotonic() + 120
    while not (room / "out" / "shard-000000.json").exists():
        assert first.poll() is None and time.monotonic() < deadline, first.communicate()
        time.sleep(0.02)
    helpers = psutil.Process(first.pid).children(recursive=True)
    os.kill(first.pid, signal.SIGKILL)
    first.communicate()
    assert not (room / "out" / "tokens.json").exists()
    assert not psutil.wait_procs(helpers, timeout=60)[1]
    second = command(room, "--json")
    said, reported = second.communicate(timeout=240)
    assert second.returncode == 0, reported
    assert "keeps " in reported and " finished shard" in reported
    (made,) = json.loads(said)["outputs"]
    assert made["documents"] == DOCUMENTS
    assert rows("tokens", room / "out") == rows("text", room / "source.txt")


@pytest.mark.gate
def test_conversations_and_mixtures_are_tokenised_in_several_processes(room: Path) -> None:
    (room / "template.jinja").write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    turns = [{"role": "user", "content": "why"}, {"role": "assistant", "content": "so"}]
    (room / "chat.jsonl").write_text(f"{json.dumps({'messages': turns})}\n" * 3000)
    (room / "few.txt").write_text("one\n\ntwo")
    (room / "job.yaml").write_text("""
name: shards
model: {vocab_size: 320}
data:
  kind: mixture
  chat_template: template.jinja
  parts: [{kind: chat, path: chat.jsonl}, {kind: text, path: few.txt, name: words, weight: 0.1}, {kind: synthetic}]
""")
    running = command(room)
    said, reported = running.communicate(timeout=240)
    assert running.returncode == 0, reported
    assert said.startswith("chat: 3,000 documents") and "\nwords: 2 documents" in said
    section = yaml.safe_load(said.partition("with this section:\n")[2])["data"]
    assert [part["kind"] for part in section["parts"]] == ["tokens", "tokens", "synthetic"]
    source = load_job(room / "job.yaml").job
    assert (
        open_documents(Job.model_validate({**source.model_dump(), "data": section})).identity
        == open_documents(source).identity
    )
    (room / "chat.jsonl").write_text('{"messages": 3}\n' * 1999 + "no JSON\n")
    running = command(room, "--out", "other")
    _, reported = running.communicate(timeout=240)
    assert running.returncode == 2 and "chat.jsonl:1: " in reported and "1,997 more rows cannot be used" in reported


def test_an_error_of_another_process_names_the_place(room: Path) -> None:
    (room / "job.yaml").write_text(JOB.replace("kind: text", "kind: jsonl").replace("source.txt", "lines.jsonl"))
    (room / "lines.jsonl").write_text('{"text": "one"}\n{"text": ""}\n')
    running = command(room)
    _, reported = running.communicate(timeout=120)
    assert running.returncode == 2 and "lines.jsonl:2 is a document without a token" in reported


@pytest.mark.slow
def test_programs_of_other_users_may_read_the_shards(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "source.txt").write_text("a paragraph\n\nanother\n")
    words = ("data", "tokenize", "job.yaml", "--out", "out", "--processes", "1")
    run_python("-m", "raypp", *words, cwd=tmp_path, umask=0o022)
    files = list((tmp_path / "out").iterdir())
    assert "tokens.json" in [path.name for path in files] and len(files) > 3
    assert all(path.is_file() and path.stat().st_mode & 0o044 == 0o044 for path in files)
