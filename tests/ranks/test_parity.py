"""Tests `raypp parity` from the job file to the table and the exit code."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from harness import start_fork_server
from training import document

from raypp.cli import parity_command
from raypp.cli.main import run
from raypp.errors import JobError
from raypp.job.job_file import load_job
from raypp.job.load import parse_job
from raypp.job.precision import FP32
from raypp.tools.parity import run_parity


@pytest.fixture(autouse=True)
def fork_server() -> None:
    """raypp would start another for its ranks, which later tests of this worker would use."""
    start_fork_server()


def job_file(folder: Path, **settings: Any) -> str:
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(document(layers=2, microbatches=4, **settings)))
    return str(path)


def test_a_pipeline_is_found_to_be_the_same_bit_for_bit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run(["parity", job_file(tmp_path, pp=2), "--steps", "2"]) == 0
    printed = capsys.readouterr().out
    assert "bitwise equal: losses, norms and all 21 parameters" in printed
    assert "pp 2, 1f1b, against one process" in printed
    assert max(map(len, printed.splitlines())) <= 80


@pytest.mark.gate
def test_replicas_are_within_the_tolerance_and_beyond_a_stricter_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = job_file(tmp_path, fsdp=2)
    answer = run_parity(load_job(path).job, 1, 1e-12)
    assert not answer["passed"] and not answer["bitwise"] and 1e-12 < answer["max_error"] <= FP32.tolerance == 1e-5
    assert answer["world"] == 2 and answer["compared"] == 21 and answer["steps"][0]["gradients"] == 21
    # Runs the command with this answer from the process that it queries.
    monkeypatch.setattr(parity_command, "ask", lambda *request: answer)
    assert run(["parity", path, "--steps", "1", "--tolerance", "1e-12"]) == 1
    assert "outside the tolerance" in capsys.readouterr().out
    assert run(["parity", path, "--steps", "1", "--tolerance", "1e-12", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == answer


def test_what_a_rank_says_when_it_fails_is_reported(tmp_path: Path) -> None:
    source = yaml.safe_load(Path(job_file(tmp_path)).read_text())
    (tmp_path / "broken.tokens").write_bytes(b"no tokens")
    source["data"] = {"kind": "jsonl", "path": str(tmp_path / "broken.tokens"), "seq_len": 32}
    source["model"]["vocab_size"] = 300
    with pytest.raises(JobError, match="broken"):
        run_parity(parse_job(source), 1)


def test_more_ranks_than_the_machine_can_bear_are_refused_before_they_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = yaml.safe_load(Path(job_file(tmp_path)).read_text())
    (tmp_path / "job.yaml").write_text(yaml.safe_dump({**source, "mesh": {"dp_replicate": 4096}}))
    assert run(["parity", str(tmp_path / "job.yaml")]) == 4
    said = capsys.readouterr().err
    assert "4096 ranks would start 4096 processes on this machine" in said and "--max-ranks 4096" in said
    assert run(["parity", job_file(tmp_path, pp=2), "--max-ranks", "1"]) == 4
    assert "the limit is 1 (--max-ranks)" in " ".join(capsys.readouterr().err.split())
