"""Tests Hugging Face datasets: the layouts of folders, text and conversations, damaged files."""

import builtins
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from data_jobs import job, texts_of
from lazily import Lazily

from raypp.errors import DataError
from raypp.job.checks import check_spec
from raypp.rank.data.sources import check_data, open_documents

pa: Any = Lazily("pyarrow")
pq: Any = Lazily("pyarrow.parquet")


def table(*texts: str | None, **more: Any) -> Any:
    return pa.table({"text": pa.array(texts, pa.string()), **more})


def parquet(path: Path, *texts: str | None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table(*texts), path, row_group_size=2)


def arrow(path: Path, *texts: str | None, stream: bool = True) -> None:
    """Writes as `datasets` does: a stream of record batches."""
    path.parent.mkdir(parents=True, exist_ok=True)
    schema = table("").schema
    with pa.OSFile(str(path), "wb") as sink:
        writer = pa.ipc.new_stream(sink, schema) if stream else pa.ipc.new_file(sink, schema)
        with writer:
            for text in texts:
                writer.write_table(table(text))


def read(path: Path, **data: Any) -> list[str]:
    return texts_of(open_documents(job(kind="hf", path=str(path), **data)).train)


def refused(path: Path | str, **data: Any) -> str:
    with pytest.raises(DataError) as caught:
        read(Path(path), **data)
    return str(caught.value)


def test_a_folder_as_on_the_hub(tmp_path: Path) -> None:
    parquet(tmp_path / "data" / "train-00000-of-00002.parquet", "a", "b", "c")
    parquet(tmp_path / "data" / "train-00001-of-00002.parquet", "d")
    parquet(tmp_path / "data" / "test-00000-of-00001.parquet", "e")
    assert read(tmp_path) == ["a", "b", "c", "d"]
    assert read(tmp_path, split="test") == ["e"]
    assert read(tmp_path / "data" / "test-00000-of-00001.parquet") == ["e"]
    assert "has no split 'dev'" in refused(tmp_path, split="dev")
    assert "one of test, train" in refused(tmp_path, split="dev")


def test_a_folder_as_save_to_disk_writes_it(tmp_path: Path) -> None:
    for split, texts in (("train", ("a", "b")), ("validation", ("c",))):
        arrow(tmp_path / "all" / split / "data-00000-of-00001.arrow", *texts)
        (tmp_path / "all" / split / "state.json").write_text("{}")
        arrow(tmp_path / "all" / split / "cache-0123.arrow", "of a map")
    assert read(tmp_path / "all") == ["a", "b"]
    assert read(tmp_path / "all", split="validation") == ["c"]
    assert read(tmp_path / "all" / "validation") == ["c"]
    arrow(tmp_path / "one" / "data-00000-of-00002.arrow", "x")
    arrow(tmp_path / "one" / "data-00001-of-00002.arrow", "y", stream=False)
    assert read(tmp_path / "one") == ["x", "y"]


@pytest.mark.parametrize("kind", ["hub", "save_to_disk"])
def test_splits_with_names_of_their_own(kind: str, tmp_path: Path) -> None:
    for split in ("train_sft", "train_gen", "test_sft"):
        for index in (0, 1):
            if kind == "hub":
                parquet(tmp_path / "data" / f"{split}-0000{index}-of-00002-a3ecf92756993583.parquet", split)
            else:
                arrow(tmp_path / split / f"data-0000{index}-of-00002.arrow", split)
    assert read(tmp_path, split="train_sft") == ["train_sft"] * 2
    assert read(tmp_path, split="Test") == ["test_sft"] * 2, "there is one such split"
    for split in ("train", "sft", "dev"):
        reported = refused(tmp_path, split=split)
        assert f"has no split '{split}'" in reported and "one of test_sft, train_gen, train_sft" in reported


def test_configurations_are_folders(tmp_path: Path) -> None:
    parquet(tmp_path / "en" / "train-0.parquet", "one")
    parquet(tmp_path / "fr" / "train-0.parquet", "un")
    assert "several configurations (folders)" in refused(tmp_path)
    assert read(tmp_path, config="fr") == ["un"]
    assert "has no configuration (folder) 'de'" in refused(tmp_path, config="de")


def test_empty_texts_are_skipped_and_other_columns_named(tmp_path: Path) -> None:
    parquet(tmp_path / "a.parquet", "a", "", None, "b")
    assert read(tmp_path) == ["a", "b"]
    pq.write_table(table("x", body=["y"], number=[1]), tmp_path / "b.parquet")
    assert read(tmp_path / "b.parquet", text_key="body") == ["y"]
    assert "holds no text" in refused(tmp_path / "b.parquet", text_key="number")
    assert "has no column 'other', but text, body, number" in refused(tmp_path / "b.parquet", text_key="other")
    assert "has no column 'body'" in refused(tmp_path / "*.parquet", text_key="body")


def test_a_shard_whose_column_is_null_is_skipped_unless_all_are(tmp_path: Path) -> None:
    nothing = pa.table({"text": pa.nulls(2), "id": [1, 2]})
    pq.write_table(nothing, tmp_path / "train-00000-of-00002.parquet")
    with pytest.raises(DataError, match="contains no documents"):
        read(tmp_path)
    parquet(tmp_path / "train-00001-of-00002.parquet", "a", "b")
    assert read(tmp_path) == ["a", "b"]
    remarks = open_documents(job(kind="hf", path=str(tmp_path))).remarks
    assert remarks == (f"{tmp_path}/train-00000-of-00002.parquet: skipped: 'text' is null (2 rows)",)
    pq.write_table(pa.table({"text": pa.array([None, None], pa.string())}), tmp_path / "train-00000-of-00002.parquet")
    assert read(tmp_path) == ["a", "b"]


def test_a_column_of_text_beside_conversations_is_a_question(tmp_path: Path) -> None:
    turns = [[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]]
    pq.write_table(pa.table({"text": ["the text"], "body": ["the body"], "messages": turns}), tmp_path / "a.parquet")
    (tmp_path / "t.jinja").write_text("{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}")
    template = {"chat_template": str(tmp_path / "t.jinja")}
    said = refused(tmp_path)
    assert "have a column 'text', and messages: either could be trained on" in said
    assert "data.columns: {messages: messages} for conversations, or {text: text} for the text" in said
    assert read(tmp_path, columns={"text": "text"}) == ["the text"]
    assert read(tmp_path, text_key="body") == ["the body"]

    def conversation(**data: Any) -> str:
        train = open_documents(job(kind="hf", path=str(tmp_path), **data)).train
        return bytes(train.ids(0).tolist()).decode()

    assert (
        conversation(**template)
        == conversation(columns={"messages": "messages"}, **template)
        == ("user:a;assistant:b;")
    )
    assert "data.chat_template: has no effect: the data are the texts of the column 'body'" in refused(
        tmp_path, text_key="body", **template
    )
    parquet(tmp_path / "b" / "a.parquet", "a")
    assert "data.loss: has no effect" in refused(tmp_path / "b", loss="last")


def test_prompts_and_completions_carry_loss_on_completions(tmp_path: Path) -> None:
    rows = pa.table({"prompt": ["ab", "c"], "completion": ["d", "ef"]})
    pq.write_table(rows, tmp_path / "a.parquet")
    train = open_documents(job(kind="hf", path=f"{tmp_path}/a.parquet")).train
    carried = []
    for index in range(2):
        loss = train.carries_loss(index)
        assert loss is not None
        carried.append(bytes(int(id) for id, one in zip(train.ids(index), loss, strict=True) if one and id < 256))
    assert carried == [b"d", b"ef"]


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_damaged_files_are_errors(tmp_path: Path, kind: str) -> None:
    file = tmp_path / f"a.{kind}"
    (parquet if kind == "parquet" else arrow)(file, *(f"text {number}" for number in range(40)))
    whole = file.read_bytes()
    for content in (b"x", whole[:-9], whole[: len(whole) // 2], whole[9:], b"PAR1" * 9, b"ARROW1\0\0" * 9):
        file.write_bytes(content)
        try:
            found = read(tmp_path)
        except DataError as error:
            assert f"a.{kind} cannot be read as {kind}" in str(error) or "not valid" in str(error)
        else:
            assert found == [f"text {number}" for number in range(len(found))]  # a stream that ends early
    for place in range(0, len(whole), max(1, len(whole) // 300)):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        try:
            read(tmp_path)
        except DataError as error:
            assert len(str(error)) < 3000


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A hub that accepts connections and never answers, and the folder of what it gave earlier."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("raypp.rank.data.hf._PATIENCE_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        yield tmp_path / "hub"


def downloaded(hub: Path, *texts: str) -> None:
    """Lays out a dataset as Hugging Face's library keeps what it downloads."""
    there = hub / "datasets--org--name"
    parquet(there / "blobs" / "0123", *texts)
    (there / "refs").mkdir()
    (there / "refs" / "main").write_text("abc")
    (there / "snapshots" / "abc" / "data").mkdir(parents=True)
    (there / "snapshots" / "abc" / "data" / "train-0.parquet").symlink_to("../../../blobs/0123")


@pytest.mark.parametrize("offline", [False, True])
def test_a_name_on_the_hub_is_what_was_downloaded_or_an_answer_in_time(
    hub: Path, offline: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    asked = job(kind="hf", path="org/name")
    assert check_spec(asked) == []
    said = refused("org/name")
    assert "org/name is not a folder on this node, and the hub does not provide it: " in said
    assert ("HF_HUB_OFFLINE" if offline else "Timeout") in said and "not among what was downloaded earlier" in said
    assert "hf download --repo-type dataset org/name --local-dir DIR" in said
    downloaded(hub, "from the hub")
    assert texts_of(open_documents(asked).train) == ["from the hub"]
    assert "the hub does not answer; reading what was downloaded of org/name earlier" in caplog.text


def test_a_missing_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    parquet(tmp_path / "a.parquet", "a")
    usual = builtins.__import__

    def without(name: str, *more: Any) -> Any:
        if name.partition(".")[0] in ("pyarrow", "huggingface_hub"):
            raise ImportError(name)
        return usual(name, *more)

    monkeypatch.setattr(builtins, "__import__", without)
    assert "pip install 'raypp[hf]'" in refused(tmp_path)
    assert "pip install 'raypp[hf]'" in refused("org/name")


def test_the_first_rows_are_read_before_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that wrong columns and rows are found before a cluster is asked for anything."""

    def found(name: str, **data: Any) -> list[str]:
        return [f"{one.key}: {one.fault}" for one in check_data(job(kind="hf", path=str(tmp_path / name), **data))]

    turns = [[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]]
    parquet(tmp_path / "texts.parquet", "a", "b")
    pq.write_table(table("a", messages=turns), tmp_path / "both.parquet")
    pq.write_table(pa.table({"messages": [*turns, [{"role": "robot", "content": "c"}]]}), tmp_path / "robot.parquet")
    assert found("texts.parquet") == []
    (problem,) = found("texts.parquet", text_key="body")
    assert problem == f"data.path: {tmp_path}/texts.parquet has no column 'body', but text"
    (problem,) = found("both.parquet")
    assert problem == "data.path: the data have a column 'text', and messages: either could be trained on"
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}")
    (problem,) = found("robot.parquet", chat_template=str(template))
    assert problem.startswith(f"data.path: {tmp_path}/robot.parquet[1]: ") and "robot" in problem
    monkeypatch.chdir(tmp_path)
    assert check_data(job(kind="hf", path="org/name")) == [], "what is on the hub is not fetched for a check"
