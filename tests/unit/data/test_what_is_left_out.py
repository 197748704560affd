"""Files, contents and answers that other trainers read or leave out: what raypp makes of each."""

import bz2
import gzip
import json
import lzma
import zipfile
from pathlib import Path
from typing import Any

import pytest
from chat_samples import turns
from data_jobs import job, texts_of

from raypp.errors import DataError
from raypp.rank.data.chat_template import ChatTemplate
from raypp.rank.data.rows import Encoded, RowEncoder
from raypp.rank.data.source_files import MOST_RATIO
from raypp.rank.data.sources import open_documents
from raypp.rank.data.tokenizer import ByteTokenizer

CALL = {"type": "function", "id": "call_1", "function": {"name": "look", "arguments": '{"at": "the \\"dog\\""}'}}
THINKING = "<think>one and one</think>\n\ntwo"


def said(**data: Any) -> str:
    """Returns the one problem of data of which a single file has this content."""
    with pytest.raises(DataError) as caught:
        open_documents(job(**data))
    (problem,) = caught.value.problems
    return f"{problem.fault} | {problem.fix}"


def test_every_usual_compression_is_read(tmp_path: Path) -> None:
    lines = "".join(f'{{"text": "document {i}"}}\n' for i in range(3)).encode()
    for name, pack in (("a.jsonl.bz2", bz2.compress), ("b.jsonl.xz", lzma.compress), ("c.jsonl.gz", gzip.compress)):
        (tmp_path / name).write_bytes(pack(lines) + pack(lines))
    documents = open_documents(job(kind="jsonl", path=str(tmp_path)))
    assert texts_of(documents.train) == [f"document {i}" for i in range(3)] * 6 and not documents.remarks


@pytest.mark.parametrize(("name", "pack"), [("a.txt.bz2", bz2.compress), ("a.txt.xz", lzma.compress)])
def test_a_block_that_becomes_too_large_is_refused_before_it_is_in_memory(name: str, pack: Any, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(pack(bytes(80 << 20)))
    with pytest.raises(DataError, match=rf"more than ({MOST_RATIO} times as large|64 MiB)"):
        open_documents(job(kind="text", path=str(tmp_path / name)))


def test_files_of_a_folder_that_are_not_read_are_counted(tmp_path: Path) -> None:
    unread = ("b.csv", "c.CSV", "d.zip", "dataset_info.json", "README.md", "e")
    hidden = (".git/f.jsonl", "__MACOSX/g.jsonl", "_temporary/0/h.jsonl", "sub/.i.jsonl")
    for name in ("a.jsonl", "sub/b.json", *unread, *hidden):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text('{"text": "one"}')
    (tmp_path / "gone.jsonl").symlink_to("nothing")
    documents = open_documents(job(kind="jsonl", path=str(tmp_path)))
    assert documents.total == 2
    (remark,) = documents.remarks
    place, _, words = remark.partition(": 7 files are not read: ")
    assert place == str(tmp_path)
    assert sorted(words.split(", ")) == [
        "1 .zip", "1 README.md", "1 broken link", "1 dataset_info.json", "1 without an ending", "2 .csv",
    ]  # fmt: skip


def test_a_file_of_another_format_is_called_that(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,label\nthe dog,1\n")
    (tmp_path / "packed.jsonl").write_bytes(gzip.compress(b'{"text": "one"}'))
    (tmp_path / "b.parquet").write_bytes(b"PAR1")
    (tmp_path / "lfs.txt").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with zipfile.ZipFile(tmp_path / "z.json", "w") as archive:
        archive.writestr("a.json", "[]")
    for name, words in (
        ("a.csv", "a.csv is .csv, and this kind of data reads .jsonl"),
        ("b.parquet", "set data.kind to hf"),
        ("packed.jsonl", "begins like a .gz file"),
        ("z.json", "begins like a .zip file"),
        ("lfs.txt", "is a pointer of Git LFS"),
    ):
        assert words in said(kind="text" if name == "lfs.txt" else "jsonl", path=str(tmp_path / name))


def encoded(row: dict[str, Any], template: str | None) -> Encoded:
    (found,) = RowEncoder(ByteTokenizer(), None if template is None else ChatTemplate(template)).encode([row])
    assert isinstance(found, Encoded), found
    return found


CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}"
    "{% endif %}</s>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_content_that_does_not_reach_the_text_is_said() -> None:
    drops = CHAT.replace("m.content", "m.content.split('</think>')[-1]")
    whole, cut = (encoded({"messages": turns(" 1+1? ", THINKING)}, template) for template in (CHAT, drops))
    assert not whole.remarks and "one and one" in whole.text and "one and one" not in cut.text
    (remark,) = cut.remarks
    assert remark.startswith("content of assistant turns before </think> is not in the text")
    called = {"messages": [*turns("a?"), {"role": "assistant", "content": "", "tool_calls": [CALL]}, *turns("b?", "c")]}
    assert not encoded(called, CHAT).remarks, "arguments are written as JSON, ids need not be"
    forgets = CHAT.replace("m.tool_calls | tojson", "m.tool_calls[0].function.name")
    assert encoded(called, forgets).remarks == {
        "tool_calls of assistant turns is not in the text: the chat template leaves it out, or changes it"
    }
    later = CHAT.replace("{{ m.content", "{% if loop.last %}{{ m.thinking }}{% endif %}{{ m.content")
    thinks = [{**turn, "thinking": "hm"} if turn["role"] == "assistant" else turn for turn in turns("a", "b", "c", "d")]
    assert not encoded({"messages": thinks}, later.replace("loop.last", "true")).remarks
    thinks[1]["thinking"] = "well"
    assert any(one.startswith("thinking of assistant") for one in encoded({"messages": thinks}, later).remarks)


@pytest.mark.parametrize(
    ("row", "template"),
    [
        ({"messages": turns("say nothing", "")}, CHAT),
        ({"instruction": "say nothing", "input": "", "output": ""}, CHAT),
        ({"instruction": "say nothing", "output": ""}, None),
        ({"prompt": "say nothing", "completion": ""}, None),
    ],
)
def test_an_empty_answer_is_learnt_whatever_the_kind_of_row_and_counted(row: Any, template: str | None) -> None:
    found = encoded(row, template)
    assert found.remarks == {"an answer is empty: only its end is learnt"}
    assert found.ids[found.loss].tolist() == ([*b"</s>"] if template else [256])


def test_tokens_without_training_are_counted_by_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"prompt": "a" * i, "completion": "b" * 10} for i in range(1, 41)]  # with the end, 11 carry loss
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data: dict[str, Any] = {"kind": "chat", "path": str(tmp_path / "a.jsonl"), "seq_len": 41}
    plain = open_documents(job(**data))
    assert plain.untrained() == {"masked": 820, "too_long": 0, "held_out": 0}
    monkeypatch.setattr("raypp.rank.data.corpus._CHUNK", 100)
    assert plain.untrained_in_words(most=10**9) == plain.untrained_in_words()
    assert plain.untrained_in_words(most=1).startswith("about ")
    both = open_documents(job(**data, too_long="drop", eval={"fraction": 0.1}))
    counts, trained = both.untrained(), 11 * len(both.train)
    assert both.held_out is not None and counts["held_out"] == both.held_out.lengths().sum()
    assert counts["too_long"] == sum(11 + i for i in range(31, 41)) and trained + sum(counts.values()) == 820 + 440
    assert both.untrained_in_words().startswith(f"{1260 - trained:,} of 1,260 tokens are not trained on: ")
