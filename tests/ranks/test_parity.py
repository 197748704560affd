"""Tests `raypp parity` from the job file to the table and the exit code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from harness import start_fork_server
from rich.console import Console
from safetensors.torch import save_file
from test_mesh_does_not_change_numbers import document

from raypp.cli import parity_command
from raypp.cli.main import run
from raypp.cli.parity_command import parity_view
from raypp.errors import RunFailedError
from raypp.measure.parity import TOLERANCE, compare, one_process_job, relative_error, run_parity
from raypp.spec.load import load_job, parse_job

pytestmark = pytest.mark.ranks


@pytest.fixture(autouse=True)
def fork_server() -> None:
    """raypp would start another one for its ranks, and all later tests of this worker would use
    it."""
    start_fork_server()


def job_file(folder: Path, **settings: Any) -> str:
    source = document(microbatches=4 // settings.get("fsdp", 1), **settings)
    source["model"]["num_layers"] = 2
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(source))
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


@pytest.mark.slow
@pytest.mark.gate
def test_replicas_are_within_the_tolerance_and_beyond_a_stricter_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = job_file(tmp_path, fsdp=2)
    answer = run_parity(load_job(path).job, 1, 1e-12)
    assert not answer["passed"] and not answer["bitwise"] and 1e-12 < answer["max_error"] <= TOLERANCE["fp32"] == 1e-5
    assert answer["world"] == 2 and answer["compared"] == 21 and answer["steps"][0]["gradients"] == 21
    # Runs the command with this answer from the process that it queries.
    monkeypatch.setattr(parity_command, "ask", lambda *request: answer)
    assert run(["parity", path, "--steps", "1", "--tolerance", "1e-12"]) == 1
    assert "outside the tolerance" in capsys.readouterr().out
    assert run(["parity", path, "--steps", "1", "--tolerance", "1e-12", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == answer


def test_what_a_rank_says_when_it_fails_is_told(tmp_path: Path) -> None:
    source = yaml.safe_load(Path(job_file(tmp_path)).read_text())
    (tmp_path / "broken.tokens").write_bytes(b"no tokens")
    source["data"] = {"kind": "jsonl", "path": str(tmp_path / "broken.tokens"), "seq_len": 32}
    source["model"]["vocab_size"] = 300
    with pytest.raises(RunFailedError, match="rank 0 of 1 failed: "):
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


def test_the_reference_reads_all_replicas_rows_and_has_nothing_cut() -> None:
    job = parse_job(document(pp=2, fsdp=2, dp_replicate=2, microbatches=2, schedule="gpipe"))
    reference = one_process_job(job)
    assert reference.mesh.world == 1 and reference.pipeline.microbatches == 8
    assert reference.model == job.model and reference.train == job.train and reference.data == job.data


def leave(folder: Path, loss: float, weight: torch.Tensor, name: str = "w") -> Path:
    folder.mkdir()
    (folder / "figures.0.json").write_text(json.dumps([{"loss": loss, "grad_norm": 1.0, "tokens": 5}]))
    for kind in ("step-1", "weights"):
        save_file({name: weight}, folder / f"{kind}.0.safetensors")
    return folder


def test_a_difference_is_named_with_its_size(tmp_path: Path) -> None:
    one = leave(tmp_path / "a", 2.0, torch.tensor([3.0, 4.0]))
    found = compare(leave(tmp_path / "b", 2.0, torch.tensor([3.0, 4.5])), one, 1)
    assert not found["bitwise"] and found["max_error"] == pytest.approx(0.1)
    assert [(p["name"], p["gradient_error"]) for p in found["parameters"]] == [("w", pytest.approx(0.1))]
    assert compare(one, one, 1)["bitwise"]
    assert compare(leave(tmp_path / "c", 2.0002, torch.tensor([3.0, 4.0])), one, 1)["max_error"] == pytest.approx(1e-4)


def test_a_parameter_that_one_of_the_two_has_not_is_infinitely_wrong(tmp_path: Path) -> None:
    one = leave(tmp_path / "a", 2.0, torch.ones(2))
    found = compare(leave(tmp_path / "b", 2.0, torch.ones(2), "other"), one, 1)
    assert found["max_error"] == float("inf") and len(found["parameters"]) == 2


def test_not_a_number_is_no_small_error() -> None:
    assert relative_error(torch.tensor([float("nan")]), torch.ones(1)) == float("inf")
    assert relative_error(torch.ones(1), torch.tensor([float("nan")])) == float("inf")


def test_the_table_fits_80_columns_with_the_longest_names() -> None:
    name = "model.layers.101.self_attn.a_projection_with_quite_a_long_name.weight"
    step = {"step": 100, "loss": [5.123456789, 5.123456788], "grad_norm": [12345.6789, 12345.6788], "tokens": [1, 1]}
    answer = {
        "steps": [{**step, "gradients": 1000, "differing": 1000, "worst": 1.5e-7}],
        "parameters": [{"name": name, "gradient_error": 1.5e-7, "weight_error": float("inf")}] * 12,
        "compared": 1000, "max_error": float("inf"), "bitwise": False, "passed": False, "tolerance": 1e-5,
    }  # fmt: skip
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    console.print(parity_view(parse_job(document(pp=2, fsdp=2, dp_replicate=2)), answer))
    text = console.export_text()
    assert "and 4 more that differ less" in text and "outside the tolerance: largest relative error inf" in text
    assert max(map(len, text.splitlines())) <= 80
