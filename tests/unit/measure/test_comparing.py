"""What `raypp parity` compares with, how it names differences, and its table."""

import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file

from raypp.cli.parity_command import parity_view
from raypp.job.load import parse_job
from raypp.tools.parity import compare, one_process_job, relative_error

MESH = {"pp": 2, "fsdp": 2, "dp_replicate": 2}


def test_the_reference_reads_all_replicas_rows_and_has_nothing_cut() -> None:
    job = parse_job({"name": "mesh", "mesh": MESH, "pipeline": {"microbatches": 2, "schedule": "gpipe"}})
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
    console.print(parity_view(parse_job({"name": "mesh", "mesh": MESH}), answer))
    text = console.export_text()
    assert "and 4 more that differ less" in text and "outside the tolerance: largest relative error inf" in text
    assert max(map(len, text.splitlines())) <= 80
