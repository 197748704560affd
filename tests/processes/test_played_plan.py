"""`raypp plan --exact` plays each pipeline rank in a process of its own."""

import json
from pathlib import Path

import pytest

from raypp.cli.main import run

JOB = """
name: small
model: {num_layers: 2, hidden_size: 64, num_heads: 4, num_kv_heads: 2, ffn_size: 128, vocab_size: 512}
data: {kind: text, path: job.yaml, seq_len: 128}
mesh: {pp: 2, fsdp: 2}
pipeline: {microbatches: 4}
train: {steps: 1, precision: bf16}
"""


def test_each_pipeline_rank_is_played_and_is_what_the_formula_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    assert run(["plan", str(path), "--exact", "--json", "--device", "rtx4090"]) == 0
    printed = capsys.readouterr()
    plan = json.loads(printed.out)
    assert [row["pp"] for row in plan["played"]] == [0, 1] and "Warning" not in printed.err
    for row, memory in zip(plan["played"], plan["memory"], strict=True):
        assert row["planned"] + row["rest"] == memory["total"]
        assert row["played"] + row["rest"] == row["total"]
        assert 0.9 * row["played"] <= row["planned"] <= 1.1 * row["played"], row
        assert row["at"].startswith(str(row["pp"])) or row["at"] == "update"
