"""What `python -m raypp.train` refuses before it meets other ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from raypp.train.torchrun import main

JOB = """
name: a
data: {kind: synthetic}
mesh: {dp_replicate: 2}
train:
  steps: 200
  sync: {kind: outer, every_steps: auto, link_gbps: 1}
checkpoint: {every_steps: 100}
"""


def test_steps_between_outer_steps_are_a_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    assert main(["--job", f"{tmp_path}/job.yaml"]) == 2
    told = capsys.readouterr().err
    assert "job.yaml:7" in told and "auto is decided by `raypp submit`" in told
    assert "--set train.sync.every_steps=N" in told
