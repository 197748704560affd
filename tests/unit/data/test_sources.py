import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_jobs import as_lists, job, loading, refused, rows_of, texts_of

from raypp.errors import DataError
from raypp.rank.data import tokenizer
from raypp.rank.data.sources import check_data, job_tokenizer, open_documents


def test_files_of_a_directory_or_a_glob_come_in_order_of_name(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "c/d.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "ignored.bin").write_text("x")
    (tmp_path / "empty.txt").write_text("")
    assert texts_of(open_documents(job(kind="text", path=str(tmp_path))).train) == ["a.txt", "b.txt", "c/d.txt"]
    for glob, found in (("*.txt", ["a.txt", "b.txt"]), ("**/*.txt", ["a.txt", "b.txt", "c/d.txt"])):
        assert texts_of(open_documents(job(kind="text", path=f"{tmp_path}/{glob}")).train) == found


def test_lines_longer_than_a_chunk_are_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raypp.rank.data.source_files._CHUNK", 5)
    paragraphs = ["short", "a much longer line", "ä" * 20, "x\ny", "end."]
    (tmp_path / "a.txt").write_text("\n\n".join(paragraphs))
    assert texts_of(open_documents(job(kind="text", path=str(tmp_path))).train) == paragraphs


ARRAYS = {
    "pretty": json.dumps([{"text": "one"}, {"text": 'two [}"]', "more": [{"a": []}]}, {"text": "three"}], indent=1),
    "one line": '[{"text": "one"},{"text": "two [}\\"]"},{"text": "three"}]',
    "two a line": '\n[{"text": "one"}, {"text":\n"two [}\\"]"}\n,\n{"text": "three"}\n]\n\n',
}


@pytest.mark.parametrize("name", ARRAYS)
def test_a_json_array_is_its_objects(name: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(ARRAYS[name], encoding="utf-8")
    assert texts_of(open_documents(job(kind="jsonl", path=str(tmp_path))).train) == ["one", 'two [}"]', "three"]


def test_all_bad_lines_are_named_at_once_in_ten_lines(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n' + '{"text": null}\n' * 2 + '{"body": "b"}\n' * 20, "utf-8")
    with pytest.raises(DataError) as caught:
        open_documents(job(kind="jsonl", path=str(tmp_path)))
    message = str(caught.value)
    assert "a.jsonl:2: has no text under 'text' (it is null)" in message and "a.jsonl:4: " in message
    assert "19 more rows cannot be used" in message and len(message.splitlines()) == 8


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("{", "is not JSON"),
        ("[1]", "is not a JSON object"),
        ('{"body": "x"}', "has no text under 'text' (it has 'body')"),
        ('{"text": 3}', "has no text under 'text' (it is a number)"),
        ('{"text": ""}', "is a document without a token"),
        ('{"text": "\\ud800"}', "is not valid Unicode"),
        (b"\xff", "is not UTF-8"),
    ],
)
def test_a_bad_json_line_is_named(tmp_path: Path, line: str | bytes, what: str) -> None:
    file = tmp_path / "a.jsonl"
    bad = line if isinstance(line, bytes) else line.encode()
    file.write_bytes(b'{"text": "fine"}\n\n' + bad + b"\n")
    message = refused(kind="jsonl", path=str(file))
    assert message.startswith(f"data.path: {file}:3")
    assert what in message


def test_a_text_that_is_not_utf8_names_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"fine\n\nGr\xfc\xdfe\n")
    assert refused(kind="text", path=str(tmp_path)) == f"data.path: {tmp_path}/a.txt:3 is not UTF-8"


def test_token_files_are_mapped_and_cut_at_the_end_id(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([1, 2, 256, 3, 256], dtype=np.uint16))
    np.save(tmp_path / "b.npy", np.array([4, 5, 6], dtype=np.int32))  # the end of the file ends the document
    train = open_documents(job(kind="tokens", path=str(tmp_path))).train
    assert [train.ids(i).tolist() for i in range(len(train))] == [[1, 2, 256], [3, 256], [4, 5, 6]]
    assert all(isinstance(shard, np.memmap) for shard in train.shards)


@pytest.mark.parametrize(
    ("array", "what"),
    [
        (np.array([1.5]), "holds float64 of shape [1]"),
        (np.array([[1, 2]]), "holds int64 of shape [1, 2]"),
        (np.array([], dtype=np.int64), "holds int64 of shape [0]"),
        (np.array([1, 2, 320]), "[2] is 320, but model.vocab_size is 320"),
        (np.array([1, -1]), "[1] is -1"),
        (np.array([1, 256, 256, 2]), "document 1 (at [2]) is a document without a token"),
    ],
)
def test_token_files_that_are_none_are_named(tmp_path: Path, array: np.ndarray[Any, Any], what: str) -> None:
    np.save(tmp_path / "a.npy", array)
    message = refused(kind="tokens", path=str(tmp_path))
    assert message.startswith(f"data.path: {tmp_path}/a.npy") and what in message


def test_a_pickle_is_never_loaded(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([{}], dtype=object), allow_pickle=True)
    assert "is not a .npy array" in refused(kind="tokens", path=str(tmp_path))


@pytest.mark.parametrize(
    ("words", "end"),
    [
        ("<pad> <eos> <bos> <unk> </s> <h1>", "<eos>"),  # Gemma
        ("<unk> <s> </s>", "</s>"),  # Llama 2, Mistral
        ("<unk> <s> </s> <|endoftext|> <|end|>", "<|endoftext|>"),  # Phi 3
        ("<|begin_of_text|> <|end_of_text|> <|eot_id|>", "<|end_of_text|>"),  # Llama 3
        ("<|endoftext|> <|im_start|> <|im_end|>", "<|endoftext|>"),  # Qwen
    ],
)
def test_documents_end_with_the_end_token_of_the_model(words: str, end: str, tmp_path: Path) -> None:
    vocabulary = {word: index for index, word in enumerate(words.split())}
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps({"model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": end}}))
    assert tokenizer.open_tokenizer(str(file)).eos_id == vocabulary[end]


def test_texts_and_their_tokens_give_the_same_rows(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo words\n\nthree")
    text = job(kind="text", path=f"{tmp_path}/a.txt")
    np.save(tmp_path / "a.npy", open_documents(text).train.shards[0])
    with loading(text) as first, loading(job(kind="tokens", path=f"{tmp_path}/a.npy")) as second:
        assert as_lists(rows_of([first.next_step()])) == as_lists(rows_of([second.next_step()]))


def test_synthetic_documents_count_and_have_the_wanted_lengths() -> None:
    request = job(kind="synthetic", num_documents=200, document_len=[4, 9], vocab_size=50)
    train = open_documents(request).train
    assert len(train) == 200
    assert set(train.lengths().tolist()) == set(range(4, 10))
    for index in range(200):
        *ids, end = train.ids(index).tolist()
        assert end == 49
        assert len({(after - before) % 49 for before, after in pairwise(ids)}) == 1


def test_synthetic_documents_follow_the_seed() -> None:
    digests = [open_documents(job(kind="synthetic", seed=seed)).train.digest for seed in (0, 0, 1)]
    assert digests[0] == digests[1] != digests[2]


def test_a_fraction_that_leaves_nothing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    assert refused(kind="text", path=str(tmp_path), eval={"fraction": 0.5}).startswith("data.eval.fraction: ")


def test_a_source_of_ones_own_is_found_by_its_path(monkeypatch: pytest.MonkeyPatch) -> None:
    train = open_documents(job(kind="raypp.rank.data.synthetic:read", num_documents=3, document_len=[2, 5])).train
    assert len(train) == 3


def test_the_check_before_a_run_finds_all_problems_at_once(tmp_path: Path) -> None:
    problems = check_data(job(kind="text", path=f"{tmp_path}/none", vocab_size=100, eval={"path": f"{tmp_path}/nor"}))
    assert [problem.key for problem in problems] == ["model.vocab_size", "data.path", "data.eval.path"]
    assert [p.key for p in check_data(job(kind="jsonl", tokenizer=f"{tmp_path}/t.json"))] == [
        "data.tokenizer",
        "data.path",
    ]
    assert [p.key for p in check_data(job(kind="parquet", path="x"))] == ["data.kind"]
    assert check_data(job(kind="text", path="jobs/data/kjv-new-testament.txt")) == []
    assert check_data(job(kind="synthetic")) == []
    assert check_data(job(kind="text", path="s3://somewhere/else")) == []


def a_tokenizer(tmp_path: Path, **changes: Any) -> str:
    """A tokenizer.json with a few words, a gap in its ids, and truncation switched on."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    tokenizer = Tokenizer(WordLevel({"one": 0, "two": 1, "three": 7, "<eos>": 3} | changes))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return str(tmp_path / "tokenizer.json")


def test_a_tokenizer_file_is_used_without_its_truncation_and_padding(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one two three one\n\ntwo")
    request = job(kind="text", path=f"{tmp_path}/a.txt", tokenizer=a_tokenizer(tmp_path), vocab_size=8)
    train = open_documents(request).train
    assert [train.ids(i).tolist() for i in range(2)] == [[0, 1, 7, 0, 3], [1, 3]]
    assert job_tokenizer(request).vocab_size == 8
    small = request.model_copy(update={"model": request.model.model_copy(update={"vocab_size": 7})})
    with pytest.raises(DataError, match=r"a.txt:1 has the token 'three' \(id 7\), but model.vocab_size is 7"):
        open_documents(small)


def test_synthetic_documents_beside_texts_whose_end_is_id_0_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one two\n\ntwo")
    tokenizer = a_tokenizer(tmp_path, one=3, **{"<eos>": 0})
    parts = [{"weight": 1, "path": f"{tmp_path}/a.txt"}, {"weight": 1, "kind": "synthetic"}]
    with pytest.raises(DataError, match=r"^data.tokenizer: the end id of this tokenizer is 0, and synthetic"):
        open_documents(job(kind="mixture", parts=parts, tokenizer=tokenizer))


def with_pattern(tmp_path: Path, pattern: str) -> str:
    """A tokenizer.json that splits words by a regular expression."""
    file = Path(a_tokenizer(tmp_path, a=5))
    document = json.loads(file.read_text())
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    file.write_text(json.dumps({**document, "pre_tokenizer": split}))
    return str(file)


def test_a_pattern_that_gives_up_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\n" + "a" * 40 + "!\n")
    message = refused(kind="text", path=f"{tmp_path}/a.txt", tokenizer=with_pattern(tmp_path, "(a+)+$"))
    assert message.startswith(f"data.path: the tokenizer cannot encode {tmp_path}/a.txt:3: ")
    assert "retry-limit" in message


def test_a_pattern_that_backtracks_for_too_long_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "PATIENCE_S", 0.02)
    monkeypatch.setattr(tokenizer, "LEAST_PER_S", 10**9)
    (tmp_path / "a.txt").write_text("one\n\n" + ("a" * 30 + "!") * 4)
    message = refused(kind="text", path=f"{tmp_path}/a.txt", tokenizer=with_pattern(tmp_path, "(a|aa)+$"))
    assert message.startswith(f"data.path: the tokenizer cannot encode {tmp_path}/a.txt:1 to {tmp_path}/a.txt:3: ")
    assert "a regular expression of the tokenizer may backtrack without end" in message


def test_a_paragraph_that_the_tokenizer_makes_nothing_of_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\n\u00a0.\n")
    file = Path(a_tokenizer(tmp_path))
    document = json.loads(file.read_text())
    document["normalizer"] = {"type": "Replace", "pattern": {"String": "."}, "content": ""}
    file.write_text(json.dumps(document))
    message = refused(kind="text", path=f"{tmp_path}/a.txt", tokenizer=str(file))
    assert message == f"data.path: {tmp_path}/a.txt:3 is a document without a token"


def test_files_that_are_no_tokenizer_are_named(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text(json.dumps({"model": {}}))
    data = {"kind": "text", "path": "jobs/data"}
    assert "is not a tokenizer.json" in refused(**data, tokenizer=f"{tmp_path}/broken.json")
    assert "does not exist" in refused(**data, tokenizer=f"{tmp_path}/none.json")
    file = Path(a_tokenizer(tmp_path))
    file.write_text(file.read_text().replace("<eos>", "four"))
    assert "names its end-of-text token" in refused(**data, tokenizer=str(file))
