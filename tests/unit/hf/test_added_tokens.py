"""`data.added_tokens`: the ids of training are those of the export, and the model has rows."""

from pathlib import Path
from typing import Any

import pytest
from family_tokenizers import write_family
from hf_folder import write_hf_folder
from lazily import Lazily

from raypp.api.checked_job import checked as checked_file
from raypp.errors import JobError
from raypp.job.job import Job
from raypp.job.job_file import job_file
from raypp.job.load import job_document, parse_job
from raypp.rank.data.tokenizer import FileTokenizer
from raypp.state.checkpoint.compatibility import check_resume
from raypp.tools.export.tokenizer_files import tokenizer_files

transformers: Any = Lazily("transformers")
NEW = ["<|tool|>", {"text": "<call>", "special": False}]
TEXT = "Of<|tool|> the <call>beginning</s>  <call><|im_end|>."


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_hf_folder(tmp_path, num_layers=2, hidden_size=64, num_heads=4, num_kv_heads=2, ffn_size=64, vocab_size=403)
    write_family("qwen", tmp_path)
    (tmp_path / "data.txt").write_text("In the beginning. " * 200)
    return tmp_path


def checked(folder: Path, added: list[Any], lora: dict[str, Any] | None = None, **data: Any) -> Job:
    source = {"kind": "text", "path": str(folder / "data.txt"), "added_tokens": added, "seq_len": 32, **data}
    model = {"from_hf": str(folder), "lora": lora}
    return checked_file(job_file(parse_job({"name": "a", "model": model, "data": source}))).job


@pytest.mark.parametrize("family", ["qwen", "smollm", "llama2", "llama3", "gemma"])
def test_the_exported_tokenizer_has_the_ids_of_training(family: str, tmp_path: Path) -> None:
    path = write_family(family, tmp_path / "theirs")
    job = parse_job({"name": "a", "data": {"kind": "text", "tokenizer": str(path), "added_tokens": NEW}})
    ours = FileTokenizer(path, added=job.data.added_tokens)
    assert ours.new == {"<|tool|>", "<call>"} and ours.identity != FileTokenizer(path).identity
    for name, content in tokenizer_files(job_document(job), None, job.model).files.items():
        (tmp_path / name).write_bytes(content)
    theirs, ids = transformers.AutoTokenizer.from_pretrained(tmp_path), ours.encode(TEXT).tolist()
    assert set(ours.added.values()) < set(ids) and theirs(TEXT, add_special_tokens=False)["input_ids"] == ids
    shown = theirs.decode(ids, skip_special_tokens=True)
    assert shown == ours.decode(ids) and shown.count("<call>") == 2 and "<|tool|>" not in shown


def test_the_model_grows_and_a_run_resumes_with_the_same_tokens(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    job, again, fewer = (checked(folder, tokens) for tokens in ([*NEW, "<|im_end|>"], [*NEW, "<|im_end|>"], NEW[:1]))
    assert job.model.vocab_size == 405
    assert "the tokenizer has <|im_end|> (id 402) already" in caplog.text
    assert "<|tool|> (id 403), <call> (id 404) will be new" in caplog.text
    assert "model.vocab_size goes from 403 to 405, for data.added_tokens" in caplog.text
    assert check_resume(job_document(job), again) == []
    assert {one.key for one in check_resume(job_document(job), fewer)} == {"data.added_tokens", "model.vocab_size"}
    assert checked(folder, ["<|im_end|>"], {"rank": 4}).model.vocab_size == 403, "nothing is new"


def test_tokens_that_could_not_be_learnt_are_refused(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    for fault, added, lora, data in (
        (r"nothing would be learnt of <\|tool\|> \(id 403\), <call>", NEW, {"rank": 4}, {}),
        ("the bytes tokenizer takes no further tokens", NEW, None, {"tokenizer": "bytes"}),
        (r"added_tokens\[2\]: <\|tool\|> is listed twice", [*NEW, "<|tool|>"], None, {}),
        ("data of kind synthetic have no tokenizer", NEW, None, {"kind": "synthetic", "path": None, "tokenizer": "x"}),
    ):
        with pytest.raises(JobError, match=fault):
            checked(folder, added, lora, **data)
    checked(folder, NEW, {"rank": 4, "also_train": ["embed_tokens"]})
    assert "not to write them: to change that, add lm_head to model.lora.also_train" in caplog.text
