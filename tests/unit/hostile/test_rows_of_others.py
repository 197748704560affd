"""Templates, compressed files and rows that somebody else wrote: bounded, and refused by name."""

import gzip
import io
import json
import sys
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from raypp.errors import DataError, RayppError
from raypp.job.job import Job
from raypp.rank.data import chat_template, source_files
from raypp.rank.data.chat_template import MOST_SOURCE, ChatTemplate, TemplateFault
from raypp.rank.data.conversations import parse_row
from raypp.rank.data.faults import RowFault
from raypp.rank.data.sources import check_data, open_documents

HELLO: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]
WITHOUT_END = {
    "a macro without end": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a text that no memory holds": "{{ 'x' * 10**18 }}",
    "range": "{{ range(10**10)|list }}",
    "output": "{% for a in range(99999) %}{{ 'x' * 9999 }}{% endfor %}",
}


@pytest.mark.parametrize("name", WITHOUT_END)
def test_a_template_that_writes_without_end_ends_in_an_error_with_its_line(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_template, "MOST_OUTPUT", 1 << 20)
    with pytest.raises(TemplateFault, match="the chat template: ") as fault:
        ChatTemplate("first line\n" + WITHOUT_END[name]).render(HELLO)
    assert len(str(fault.value)) < 400


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ self.__init__.__globals__ }}",
        "{{ messages[0].update(role='assistant') }}",
        "{{ messages.append(1) }}",
        "{% set n = namespace(_x=1) %}",
        "{% set n = namespace() %}{% set n.__class__ = 1 %}",
        "{% include '/etc/passwd' %}",
        "{% import '/etc/passwd' as x %}{{ x }}",
        "{{ raise_exception('\x1b[31m' ~ 'x' * 9999) }}",
        "{{ nothing.at.all }}",
        "{{ 1 / 0 }}",
    ],
)
def test_a_template_reaches_nothing_but_its_conversation(source: str) -> None:
    before = json.dumps(HELLO)
    with pytest.raises(TemplateFault) as fault:
        ChatTemplate(source).render(HELLO)
    assert "\x1b" not in str(fault.value) and len(str(fault.value)) < 400
    assert json.dumps(HELLO) == before


@pytest.mark.parametrize("source", ["{% for %}", "{{", "{% nope %}", "{{ 'a'|nope }}", "{% generation %}", "(" * 9])
def test_what_is_no_template_is_refused_or_renders(source: str) -> None:
    try:
        ChatTemplate("\n" + source).render(HELLO)
    except DataError as error:
        assert "line 2 of the chat template" in str(error)


def test_a_template_of_any_size_or_depth_is_refused() -> None:
    for source in ("x" * (MOST_SOURCE + 1), "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}"):
        with pytest.raises(DataError, match="chat template"):
            ChatTemplate(source)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["messages", "conversations", "role", "content", "from", "value", "tools", "prompt"]), inner
    ),
    max_leaves=10,
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(messages=VALUES, tools=VALUES, key=st.sampled_from(["messages", "conversations", "prompt", "completion"]))
def test_any_row_is_parsed_or_refused_with_a_fix(messages: Any, tools: Any, key: str) -> None:
    try:
        parse_row({key: messages, "completion": tools, "tools": tools})
    except RowFault as fault:
        assert fault.reason and fault.fix


def documents(folder: Path, name: str, content: bytes, kind: str = "text") -> Any:
    (folder / name).write_bytes(content)
    data = {"kind": kind, "path": str(folder / name)}
    return open_documents(Job.model_validate({"name": "x", "model": {"vocab_size": 320}, "data": data})).train


@pytest.mark.parametrize("packing", ["gz", "zst"])
def test_a_bomb_ends_in_an_error(packing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_files, "_FREE", 1 << 18)
    line = b"x" * 999 + b"\n\n"
    packed = (
        gzip.compress(line * 5_000) if packing == "gz" else zstandard.ZstdCompressor(level=3).compress(line * 5_000)
    )
    tracemalloc.start()
    with pytest.raises(DataError, match="becomes more than 200 times as large"):
        documents(tmp_path, f"a.txt.{packing}", packed)
    assert tracemalloc.get_traced_memory()[1] < 200e6
    tracemalloc.stop()


def damaged() -> dict[str, bytes]:
    text = b"some text of a file\n\n" * 500
    whole = {"gz": gzip.compress(text), "zst": zstandard.ZstdCompressor(write_checksum=True).compress(text)}
    cases = {}
    for name, data in whole.items():
        broken = bytearray(data)
        broken[len(data) // 2] ^= 0xFF
        cases |= {f"cut.{name}": data[:-9], f"broken.{name}": bytes(broken), f"plain.{name}": text}
        cases |= {f"rest.{name}": data + b"rest", f"start.{name}": data[:5]}
    huge = zstandard.ZstdCompressor(compression_params=zstandard.ZstdCompressionParameters(window_log=30)).compressobj()
    cases["window.zst"] = huge.compress(text) + huge.flush()
    return cases


DAMAGED = damaged()


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"\.txt\.(gz|zst) (cannot be decompressed|ends too early)"):
        documents(tmp_path, name.replace(".", ".txt."), DAMAGED[name])


def test_members_and_padding_are_read_through(tmp_path: Path) -> None:
    packed = gzip.compress(b"one\n\nt") + gzip.compress(b"wo\n") + bytes(100)
    assert len(documents(tmp_path, "a.txt.gz", packed)) == 2
    assert len(documents(tmp_path, "b.jsonl.gz", gzip.compress(b'{"text": "a"}\n{"text": "b"}'), "jsonl")) == 2


def test_a_file_that_becomes_much_larger_within_reason_is_read(tmp_path: Path) -> None:
    sink = io.BytesIO()
    with gzip.GzipFile(fileobj=sink, mode="wb", compresslevel=zlib.Z_BEST_COMPRESSION) as file:
        file.write((b"y" * 199 + b"\n") * 5000)
    assert len(sink.getvalue()) * 200 < 1_000_000
    assert len(documents(tmp_path, "a.txt.gz", sink.getvalue())) == 1


@pytest.mark.parametrize(
    "config",
    [b"", b"[]", b"{", b'{"chat_template": 1}', b'{"chat_template": [1]}', b'{"chat_template": [{"name": "a"}]}',
     b'{"chat_template": [{"name": "a", "template": "b"}]}', b"[" * 99999, b'{"chat_template": "{% for %}"}', b"\xff"],
)  # fmt: skip
def test_a_tokenizer_config_of_any_content_is_refused_by_name(config: bytes, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(
        json.dumps({"model": {"type": "WordLevel", "vocab": {"a": 0, "</s>": 1}, "unk_token": "a"}})
    )
    (tmp_path / "tokenizer_config.json").write_bytes(config)
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": HELLO}))
    data = {"kind": "chat", "path": str(tmp_path / "a.jsonl"), "tokenizer": str(tmp_path / "tokenizer.json")}
    job = Job.model_validate({"name": "x", "data": data})
    assert check_data(job)
    with pytest.raises(RayppError):
        open_documents(job)


def test_zst_without_its_library_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = zstandard.ZstdCompressor().compress(b"text")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(DataError, match=r"zstandard is not installed, so \.zst cannot be read") as error:
        documents(tmp_path, "a.txt.zst", packed)
    assert "pip install zstandard" in error.value.problems[0].fix
    assert len(documents(tmp_path, "a.txt.gz", gzip.compress(b"text"))) == 1
