"""A Hugging Face model in a bucket: imported, compared, exported and used, by the command line."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hf_folder import write_hf_folder
from safetensors.numpy import load
from seaweed import BUCKET

from raypp.cli.main import run as raypp

pytestmark = [pytest.mark.gate, pytest.mark.usefixtures("in_seaweed")]


def test_a_model_in_a_bucket_is_imported_and_exported_to_a_bucket(
    seaweed_server: Any, run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAYPP_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("RAYPP_ADDRESS", raising=False)
    sizes = {"num_layers": 2, "hidden_size": 64, "num_heads": 4, "ffn_size": 96, "vocab_size": 20_000}
    before = write_hf_folder(tmp_path / "hf", **sizes)  # 10 MB: more than one part
    bucket = seaweed_server.store(BUCKET, f"{run}-hf")
    for path in (tmp_path / "hf").iterdir():
        bucket.put(path.name, path.read_bytes())
    place = f"s3://{BUCKET}/{run}-store/model"
    assert raypp(["checkpoints", "import", f"s3://{BUCKET}/{run}-hf", place]) == 0
    assert raypp(["checkpoints", "verify", place]) == 0
    assert raypp(["checkpoints", "diff", place, f"{place}/step-0"]) == 0
    assert raypp(["checkpoints", "export", place, f"s3://{BUCKET}/{run}-out"]) == 0
    out = seaweed_server.store(BUCKET, f"{run}-out")
    after = load(out.get("model.safetensors"))
    assert after.keys() == before.keys() and all(np.array_equal(after[name], before[name]) for name in before)
    assert raypp(["checkpoints", "export", place, f"s3://{BUCKET}/{run}-out"]) == 2
    capsys.readouterr()
    job = tmp_path / "tune.yaml"
    job.write_text(f"name: tune\nmodel: {{from_hf: 's3://{BUCKET}/{run}-out'}}\ndata: {{kind: synthetic}}\n")
    assert raypp(["plan", str(job), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"] == sum(value.size for value in before.values())
    assert raypp(["plan", str(job), "--set", f"model.from_hf=s3://{BUCKET}/{run}-nothing"]) == 2
    assert "config.json" in capsys.readouterr().err
