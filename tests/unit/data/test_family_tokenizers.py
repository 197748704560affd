"""Beginning, end and ids of texts are those of transformers, for each family's tokenizer."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_jobs import data_identity, job
from family_tokenizers import FAMILIES, write_family
from hf_folder import write_hf_folder
from lazily import Lazily

from raypp.api.checked_job import load_checked_job
from raypp.errors import DataError, JobError
from raypp.job.job_file import load_job
from raypp.job.tokenizer_file import special_tokens
from raypp.rank.data.conversations import Names
from raypp.rank.data.rows import Encoded, RowEncoder
from raypp.rank.data.sources import open_documents, source_request
from raypp.rank.data.tokenizer import FileTokenizer, document_of, framed, open_tokenizer
from raypp.rank.data.write_shards import Options, write_shards
from raypp.state.hf.from_hf import with_hf_sizes
from raypp.storage import open_store

transformers: Any = Lazily("transformers")
TEXTS = (
    "In the beginning was the Word", " two  spaces\n\nand é 漢字 😀", "it's 12", "x",
    "<s> within </s> a <|im_end|>text", "", "   three", "\n a line", "a</s>b </s> c",
)  # fmt: skip
PAIRS = (
    ("answer:\n", "it is here."),
    ("the answer: ", "it is here."),
    ("what? answer:", " here\n"),
    ("wor", "ld"),
    ("", "so"),
)


def theirs_of(path: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(path.parent)


@pytest.mark.parametrize("name", FAMILIES)
def test_special_tokens_and_texts_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    path = write_family(name, tmp_path / name)
    theirs, ours = theirs_of(path), open_tokenizer(str(path.parent))
    assert isinstance(ours, FileTokenizer) and not ours.remarks
    if name == "ends-of-model":
        assert theirs.eos_token_id is None and ours.eos_id == 401, "the first that config.json names"
    else:
        assert ours.eos_id == theirs.eos_token_id
    assert ours.bos_id == theirs.bos_token_id and special_tokens(path.parent).names.get("pad_token") == theirs.pad_token
    for text in TEXTS:
        expected = theirs(text)["input_ids"]
        if text.startswith("<s>") and expected[:2] == [theirs.bos_token_id] * 2:
            expected = expected[1:]  # a text that has its beginning gets no second one
        assert framed(ours, ours.encode(text))[0].tolist() == expected
        document = document_of(ours, ours.encode(text))[0].tolist()
        assert document == (expected if name == "with-end" else [*expected, ours.eos_id])


@pytest.mark.parametrize("model", [None, "llama", "mistral", "mixtral", "phi3"])
@pytest.mark.parametrize("setting", [{}, {"legacy": True}, {"legacy": False}, {"add_prefix_space": False}], ids=str)
def test_spaces_are_those_of_llama_tokenizer(setting: dict[str, bool], model: str | None, tmp_path: Path) -> None:
    """It ignores the file's normalizer, unless the model's type shows that the class is wrong."""
    path = write_family("llama2", tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config = {key: value for key, value in config.items() if key != "legacy"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | setting))
    if model is not None:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model}))
    theirs, ours = theirs_of(path), FileTokenizer(path)
    for text in TEXTS:
        expected = theirs(text)["input_ids"]
        found = framed(ours, ours.encode(text))[0].tolist()
        assert found == (expected[1:] if text.startswith("<s>") else expected), text
        assert ours.decode(found) == theirs.decode(found, skip_special_tokens=True)


@pytest.mark.parametrize("name", FAMILIES)
def test_prompt_and_completion_are_one_text_cut_at_the_border(name: str, tmp_path: Path) -> None:
    path = write_family(name, tmp_path / name)
    theirs, ours = theirs_of(path), FileTokenizer(path)
    rows = [{"prompt": prompt, "completion": completion} for prompt, completion in PAIRS]
    for (prompt, completion), found in zip(PAIRS, RowEncoder(ours).encode(rows), strict=True):
        assert isinstance(found, Encoded)
        whole = theirs(prompt + completion, return_offsets_mapping=True)
        end = [] if name == "with-end" else [ours.eos_id]
        assert found.ids.tolist() == [*whole["input_ids"], *end]
        begun, count = len(ours.before), len(ours.encode(prompt + completion))
        offsets = whole["offset_mapping"][begun : begun + count]
        first = next(index for index, (_, stop) in enumerate(offsets) if stop > len(prompt))
        assert found.loss.tolist()[begun + first :] == [True] * (len(found.ids) - begun - first)
        assert not prompt or not found.loss[: begun + first].any()
        learnt = ours.shown(found.ids[found.loss].tolist())
        assert completion.strip() in learnt and "answer" not in learnt


def test_a_job_decides_what_texts_begin_with(tmp_path: Path) -> None:
    path = write_family("phi3", tmp_path / "phi3")
    ids = FileTokenizer(path).encode("in")
    assert FileTokenizer(path).before == () and FileTokenizer(path, True).before == (1,)
    path = write_family("llama2", tmp_path / "llama2")
    assert [FileTokenizer(path, how).before for how in ("auto", True, False)] == [(1,), (1,), ()]
    off = FileTokenizer(path, False)
    assert "data.add_bos is false: texts do not get <s>" in off.remarks[0]
    assert document_of(off, ids)[0].tolist() == [*ids.tolist(), 2]
    path = write_family("qwen", tmp_path / "qwen")
    assert FileTokenizer(path, True).before == (400,), "the bos_token_id of generation_config.json"
    (path.parent / "generation_config.json").unlink()
    with pytest.raises(DataError, match=r"data\.add_bos: no file beside .* names a beginning of texts"):
        FileTokenizer(path, True)
    with pytest.raises(DataError, match=r"data\.add_bos: the bytes tokenizer has no token"):
        open_tokenizer("bytes", True)


def test_a_lone_tokenizer_takes_its_end_from_a_list_and_says_so(tmp_path: Path) -> None:
    path = write_family("mistral-im-end", tmp_path)
    (path.parent / "tokenizer_config.json").unlink()
    alone = FileTokenizer(path)
    assert alone.eos_id == 2 and "names its end of text: </s> is taken" in alone.remarks[0]
    (path.parent / "tokenizer_config.json").write_text("[]")
    with pytest.raises(DataError, match=r"tokenizer_config\.json: is not a JSON object"):
        FileTokenizer(path)


def test_a_token_that_the_model_lacks_is_reported_with_its_place(tmp_path: Path) -> None:
    path = write_family("olmo", tmp_path)
    document = json.loads(path.read_text())
    pad = {**document["added_tokens"][0], "content": "<new>", "id": 403}
    path.write_text(json.dumps({**document, "added_tokens": [*document["added_tokens"], pad]}))
    ours = FileTokenizer(path)
    assert ours.vocab_size == 404
    good, bad = RowEncoder(ours, names=Names({"text": "text"}), vocab_size=403).encode(
        [{"text": "a <b"}, {"text": "a <new> b"}]
    )
    assert isinstance(good, Encoded) and np.max(good.ids) == 402
    assert str(bad) == "has the token '<new>' (id 403), but model.vocab_size is 403"


def test_documents_of_every_kind_begin_as_texts_do(tmp_path: Path) -> None:
    tokenizer = str(write_family("gemma", tmp_path / "gemma").parent)
    (tmp_path / "a.txt").write_text("in the beginning\n\nthe word")
    (tmp_path / "a.jsonl").write_text('{"text": "in the beginning"}\n{"text": "the word"}\n')
    (tmp_path / "chat.jsonl").write_text('{"prompt": "in the", "completion": " beginning"}\n')
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"text": ["in the beginning", "the word"]}), tmp_path / "a.parquet")
    expected = theirs_of(Path(tokenizer) / "tokenizer.json")("in the beginning")["input_ids"]
    for kind, file in (("text", "a.txt"), ("jsonl", "a.jsonl"), ("hf", "a.parquet"), ("chat", "chat.jsonl")):
        data = {"kind": kind, "path": f"{tmp_path}/{file}", "tokenizer": tokenizer, "vocab_size": 800}
        found = open_documents(job(**data))
        assert found.train.ids(0).tolist() == [*expected, 1] and found.in_words(job(**data).data) == ""
        off = open_documents(job(**data, add_bos=False))
        assert off.train.ids(0).tolist() == [*expected[1:], 1]
        assert "texts do not get <bos>" in off.in_words(job(**data).data)


def test_shards_say_what_is_around_their_texts(tmp_path: Path) -> None:
    tokenizer = str(write_family("llama2", tmp_path / "llama2"))
    (tmp_path / "a.txt").write_text("in the beginning\n\nthe word")
    text = {"kind": "text", "path": f"{tmp_path}/a.txt", "tokenizer": tokenizer, "vocab_size": 800}
    for name, add_bos in (("with", "auto"), ("without", False)):
        read, request = source_request(job(**text, add_bos=add_bos))
        write_shards(read, request, open_store(f"{tmp_path}/{name}"), Options(1))
        shards = {**text, "kind": "tokens", "path": f"{tmp_path}/{name}"}
        assert data_identity(job(**shards, add_bos=add_bos)) == data_identity(job(**text, add_bos=add_bos))
        with pytest.raises(DataError) as refused:
            open_documents(job(**shards, add_bos="auto" if name == "without" else False))
        (problem,) = refused.value.problems
        said = (
            "<s> around each text" if name == "with" else "nothing around each text, but the job's tokenizer adds <s>"
        )
        assert problem.key == "data.add_bos" and said in problem.fault


def test_a_job_with_from_hf_takes_the_tokenizer_of_the_model(tmp_path: Path) -> None:
    sizes = {"num_layers": 1, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "ffn_size": 48, "vocab_size": 420}
    write_hf_folder(tmp_path / "model", **sizes)
    (tmp_path / "a.txt").write_text("in the beginning")
    (tmp_path / "job.yaml").write_text(f"name: a\nmodel: {{from_hf: {tmp_path}/model}}\ndata: {{path: a.txt}}\n")
    plain = with_hf_sizes(load_job(tmp_path / "job.yaml"))
    assert plain.job.data.tokenizer == "bytes" and "has no tokenizer.json" in plain.remarks[0]
    for other in ("vocab.json", "tokenizer.model", "tokenizer_config.json"):
        (tmp_path / "model" / other).write_text("{}")
        with pytest.raises(JobError, match=rf"has no tokenizer\.json, but {other}\n  fix: write one with transformers"):
            with_hf_sizes(load_job(tmp_path / "job.yaml"))
        (tmp_path / "model" / other).unlink()
    tokenizer = write_family("smollm", tmp_path / "model")
    assert with_hf_sizes(load_job(tmp_path / "job.yaml")).job.data.tokenizer == str(tokenizer)
    file = load_checked_job(tmp_path / "job.yaml")
    assert file.remarks == (f"data.tokenizer is not set: {tokenizer} is used, the tokenizer of model.from_hf",)
    named = load_job(tmp_path / "job.yaml", ["data.tokenizer=bytes"])
    assert with_hf_sizes(named).remarks == () and with_hf_sizes(named).job.data.tokenizer == "bytes"


def test_more_ids_than_rows_are_an_error_only_where_data_use_them(tmp_path: Path) -> None:
    tokenizer = write_family("unlisted-special", tmp_path / "tokenizer")  # <more> is added as id 401
    assert open_tokenizer(str(tokenizer)).vocab_size == 402
    job_file, text = tmp_path / "job.yaml", tmp_path / "a.txt"
    model = "{num_layers: 1, hidden_size: 32, num_heads: 4, ffn_size: 48, vocab_size: 401}"
    job_file.write_text(f"name: a\nmodel: {model}\ndata: {{path: a.txt, tokenizer: tokenizer}}\n")
    text.write_text("in the beginning\n\nno more")
    load_checked_job(job_file)
    text.write_text("in the beginning\n\nno <more>")
    with pytest.raises(JobError, match=r"a\.txt:3 has the token '<more>' \(id 401\), but model\.vocab_size is 401"):
        load_checked_job(job_file)
    with pytest.raises(
        JobError, match=r"every text gets the token 'er' .*\n  fix: set model\.vocab_size to at least 402"
    ):
        load_checked_job(job_file, ["model.vocab_size=257"])
