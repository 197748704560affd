"""Files of conversations: loss in the labels, rows that are too long, bad rows, resume."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from chat_samples import CHATML, CHATML_MARKED, turns, write_tokenizer
from data_jobs import as_lists, data_identity, job, loading, rows_of

from raypp.errors import DataError, JobError, RayppError
from raypp.job.job import Job
from raypp.rank.data.packing import NO_LABEL
from raypp.rank.data.sources import check_data, open_documents
from raypp.rank.data.tokenizer import FileTokenizer

PACKED = {"gz": gzip.compress, "zst": lambda data: zstandard.ZstdCompressor().compress(data)}


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    """A file of 40 conversations of growing length, and the template chatml.jinja beside it."""
    (tmp_path / "chatml.jinja").write_text(CHATML)
    rows = [{"messages": turns(f"question {i}?" * (1 + i // 8), f"answer {i}.")} for i in range(40)]
    write(tmp_path / "chats.jsonl", rows)
    return tmp_path / "chats.jsonl"


def write(path: Path, rows: list[Any]) -> None:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows), "utf-8")


def chat_job(path: Path, **data: Any) -> Job:
    template = {"chat_template": str(path.parent / "chatml.jinja")} if "tokenizer" not in data else {}
    return job(**{"kind": "chat", "path": str(path), "seq_len": 128, **template, **data})


def test_labels_are_what_the_assistant_writes_and_nothing_else(chats: Path) -> None:
    with loading(chat_job(chats, shuffle=False, seq_len=512)) as loader:
        rows = rows_of([loader.next_step()])
    said = []
    for row in rows:
        assert all(row.labels[i] in (NO_LABEL, row.tokens[i + 1]) for i in range(len(row.tokens) - 1))
        said.append(bytes(row.labels[row.labels != NO_LABEL].tolist()).decode())
    assert "".join(said).startswith("".join(f"answer {i}.<|im_end|>\n" for i in range(10)))


def test_every_document_sees_the_same_loss_packed_or_not(chats: Path) -> None:
    def labelled(**data: Any) -> int:
        with loading(chat_job(chats, eval={"fraction": 0.9}, **data)) as loader:
            return sum(int((row.labels != NO_LABEL).sum()) for row in rows_of(loader.held_out()))

    assert labelled() == labelled(packing=False) == labelled(shuffle=False)


def test_a_loader_goes_on_where_another_was_and_names_a_changed_template_or_tokenizer(chats: Path) -> None:
    with loading(chat_job(chats)) as first, loading(chat_job(chats)) as second:
        first.next_step()
        position = json.loads(json.dumps(first.position()))
        second.seek(position)
        assert as_lists(rows_of([first.next_step()])) == as_lists(rows_of([second.next_step()]))
    (chats.parent / "chatml.jinja").write_text(CHATML_MARKED)
    with loading(chat_job(chats)) as changed, pytest.raises(JobError, match="with another chat template"):
        changed.seek(position)
    (chats.parent / "chatml.jinja").write_text(CHATML)
    one, template = write_tokenizer(chats.parent / "here"), str(chats.parent / "chatml.jinja")
    given = {"vocab_size": 400, "chat_template": template}
    with loading(chat_job(chats, tokenizer=str(one), **given)) as first:
        here = first.position()
    one.parent.rename(chats.parent / "elsewhere")
    moved = chats.parent / "elsewhere" / one.name
    with loading(chat_job(chats, tokenizer=str(moved), **given)) as second:
        second.seek(here)
    moved.write_text(moved.read_text() + "\n")
    changed_one = loading(chat_job(chats, tokenizer=str(moved), **given))
    with changed_one as changed, pytest.raises(JobError, match="with another tokenizer"):
        changed.seek(here)
    write(chats, [{"messages": turns("a", "b")}])
    with loading(chat_job(chats)) as changed, pytest.raises(JobError, match="with other data"):
        changed.seek(position)


def test_what_is_too_long_is_cut_or_dropped_and_counted(chats: Path) -> None:
    cut, dropped = (open_documents(chat_job(chats, too_long=way)) for way in ("cut", "drop"))
    lengths = cut.train.lengths()
    assert cut.total == dropped.total == 40 and 0 < cut.too_long == dropped.too_long == int((lengths > 128).sum())
    assert dropped.train.lengths().tolist() == lengths[lengths <= 128].tolist()
    assert f"{cut.too_long} of 40 documents have more than 128 tokens and are cut into pieces" == (
        cut.too_long_in_words(chat_job(chats).data)
    )
    assert "are dropped" in dropped.too_long_in_words(chat_job(chats, too_long="drop").data)
    assert cut.identity != dropped.identity
    with pytest.raises(DataError, match=r"all 40 documents have more than 16 tokens"):
        open_documents(chat_job(chats, too_long="drop", seq_len=16))


def test_loss_template_and_date_are_part_of_the_identity(chats: Path) -> None:
    identity = data_identity(chat_job(chats))
    assert identity == data_identity(chat_job(chats))
    assert identity != data_identity(chat_job(chats, loss="all"))
    (chats.parent / "chatml.jinja").write_text(CHATML.replace("<|im_end|>", "<|end|>"))
    assert identity != data_identity(chat_job(chats))


def test_the_cache_keeps_the_loss(chats: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = open_documents(chat_job(chats)).train
    monkeypatch.setattr("raypp.rank.data.tokenised.IN_MEMORY_BYTES", 0)
    for _ in range(2):
        cached = open_documents(chat_job(chats)).train
        assert cached.digest == inside.digest and cached.template == inside.template
        assert cached.loss is not None and inside.loss is not None
        assert np.array_equal(cached.loss[0], inside.loss[0])
    assert open_documents(chat_job(chats, loss="all")).train.digest != inside.digest


@pytest.mark.parametrize("packing", PACKED)
def test_compressed_files_hold_the_same_rows(packing: str, chats: Path) -> None:
    identity, text = data_identity(chat_job(chats)), chats.read_bytes()
    folder = chats.parent / "packed"
    folder.mkdir()
    half = text.index(b"\n", len(text) // 2) + 1
    members = PACKED[packing](text[:half]) + PACKED[packing](text[half:])
    (folder / f"chats.jsonl.{packing}").write_bytes(members)
    (folder / "chats.csv.gz").write_bytes(b"ignored")
    template = str(chats.parent / "chatml.jinja")
    for path in (folder, folder / f"chats.jsonl.{packing}"):
        assert data_identity(chat_job(path, chat_template=template)) == identity
        assert check_data(chat_job(path, chat_template=template)) == []


def test_the_template_beside_the_tokenizer_is_used(tmp_path: Path) -> None:
    write(tmp_path / "c.jsonl", [{"messages": turns("a", "b")}])
    tokenizer = write_tokenizer(tmp_path / "model", CHATML)
    request = chat_job(tmp_path / "c.jsonl", tokenizer=str(tokenizer), vocab_size=400)
    first = open_documents(request).train
    (tmp_path / "model/chat_template.jinja").write_text(CHATML.replace("\\n", ""))
    assert open_documents(request).train.digest != first.digest
    (tmp_path / "model/chat_template.jinja").unlink()
    write_tokenizer(tmp_path / "model")
    with pytest.raises(DataError, match=r"neither chat_template\.jinja nor a chat_template in tokenizer_config\.json"):
        open_documents(request)


def test_bad_rows_are_named_with_their_lines_and_the_rest_counted(chats: Path) -> None:
    good = {"messages": turns("a", "b")}
    rows: list[Any] = [good, "{", "[]", {"messages": []}, {"messages": [{"role": "king", "content": "a"}]}, good]
    write(chats, [*rows, *[{"messages": turns("only")}] * 30])
    for problems in (list(refused(chat_job(chats)).problems), check_data(chat_job(chats))):
        assert len(problems) == 4 and all(problem.key == "data.path" and problem.fix for problem in problems)
        for line, words in ((2, "is not JSON"), (3, "is not a JSON object"), (4, "is empty")):
            assert f"chats.jsonl:{line}: " in problems[line - 2].fault and words in problems[line - 2].fault
        assert problems[3].fault == "31 more rows cannot be used"
        assert len(str(DataError(problems)).splitlines()) == 8


def test_a_check_at_submit_finds_what_is_wrong_with_the_template(chats: Path) -> None:
    (chats.parent / "chatml.jinja").write_text("{% for m in messages %}\n{{ m.nothing.more }}{% endfor %}")
    problems = check_data(chat_job(chats))
    assert "chats.jsonl:1: line 2 of the chat template" in problems[0].fault
    (chats.parent / "chatml.jinja").write_text("a\nb\n{% for %}")
    (problem,) = check_data(chat_job(chats))
    assert problem.key == "data.chat_template" and problem.fault.startswith("line 3 of the chat template")
    (chats.parent / "chatml.jinja").unlink()
    assert "does not exist" in check_data(chat_job(chats))[0].fault
    (problem,) = check_data(chat_job(chats, chat_template=None))
    assert problem.fault == "is missing: the bytes tokenizer has no chat template"
    (chats.parent / "chatml.jinja").write_text(CHATML)
    assert check_data(chat_job(chats)) == []
    assert check_data(chat_job(chats, template_date="2026-13-01"))[0].key == "data.template_date"


def test_a_tokenizer_that_does_not_fit_the_model_is_named(tmp_path: Path) -> None:
    write(tmp_path / "c.jsonl", [{"messages": turns("a", "b")}])
    tokenizer = write_tokenizer(tmp_path / "model", CHATML)
    (problem,) = check_data(chat_job(tmp_path / "c.jsonl", tokenizer=str(tokenizer), vocab_size=100))
    assert problem.key == "data.path" and "c.jsonl:1: has the token" in problem.fault
    assert "but model.vocab_size is 100" in problem.fault
    rows = FileTokenizer(tokenizer).vocab_size
    assert problem.fix == f"set model.vocab_size to at least {rows}, or use the model's own tokenizer"


def refused(job: Job) -> RayppError:
    with pytest.raises(RayppError) as caught:
        open_documents(job)
    return caught.value
