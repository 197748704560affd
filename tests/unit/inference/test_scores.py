"""Scores of rows, and the job of an evaluation."""

import json
from pathlib import Path

import pytest
import torch

from raypp.errors import JobError
from raypp.stages.models.loss import IGNORED, token_loss_sum
from raypp.tools.inference.eval_job import data_job
from raypp.tools.inference.source import Source
from raypp.tools.inference.task_model import row_scores

SIZES = {"num_layers": 2, "hidden_size": 16, "num_heads": 2, "ffn_size": 16, "vocab_size": 300}


def test_a_row_has_the_log_probability_of_its_labels_and_how_many_are_not_the_most_probable() -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 5, 7)
    labels = torch.full((3, 5), IGNORED)
    labels[0, 2:] = logits[0, 2:].argmax(-1)
    labels[1, 1:] = logits[1, 1:].argmin(-1)
    found = row_scores(logits, labels)
    assert found[:, 1].tolist() == [0, 4, 0] and found[2, 0] == 0
    for row in (0, 1):
        assert found[row, 0].item() == pytest.approx(-token_loss_sum(logits[row][None], labels[row][None]).item())


def source(folder: Path, **data: object) -> Source:
    document = {"data": data, "pipeline": {"microbatches": 3}, "mesh": {"fsdp": 2, "pp": 2}} if data else None
    run = "run" if data else ""
    return Source(str(folder), {"kind": "llama", **SIZES}, 64, "fp32", "bytes", (), str(folder), run, 1, document)


def test_the_job_keeps_rows_and_microbatches_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "held.txt").write_text("one\n\ntwo")
    held = str(tmp_path / "held.txt")
    run = source(tmp_path, kind="text", path="/gone/train.txt", seq_len=32, eval={"path": held})
    job = data_job(run, None, 1)
    # The training data need not be here.
    assert (job.data.path, job.data.eval, job.data.seq_len) == (held, None, 32)
    assert (job.pipeline.microbatches, job.mesh.world) == (6, 1)
    assert data_job(run, None, 2, ["train.micro_batch_size=5"]).train.micro_batch_size == 5


@pytest.mark.parametrize(
    ("name", "kind", "expected"),
    [
        ("a.txt", "text", "text"),
        ("a.jsonl", "text", "jsonl"),
        ("a.npy", "jsonl", "tokens"),
        ("a.other", "jsonl", "jsonl"),
        ("a.txt", "synthetic", "text"),
        ("a.other", "synthetic", "text"),
    ],
)
def test_the_kind_of_data_follows_from_the_ending(name: str, kind: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(json.dumps({"text": "one"}))
    path = {} if kind == "synthetic" else {"path": "/gone/train"}
    job = data_job(source(tmp_path, kind=kind, **path), str(tmp_path / name), 1)
    assert (job.data.kind, job.data.path) == (expected, str(tmp_path / name))


def test_data_of_another_kind_keep_what_every_kind_has(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    run = source(tmp_path, kind="jsonl", path="/gone/train.jsonl", text_key="words", seq_len=48, packing=False)
    data = data_job(run, str(tmp_path / "a.txt"), 1).data
    assert (data.kind, data.text_key, data.seq_len, data.packing) == ("text", "text", 48, False)


def test_a_folder_without_data_asks_for_them(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"does not name any data\n  fix: give --data PATH"):
        data_job(source(tmp_path), None, 1)
