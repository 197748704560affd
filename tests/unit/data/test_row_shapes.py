"""Rows as other trainers' documentation describes them: what they become, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from chat_samples import CHATML, CHATML_MARKED, FORGETFUL, MARKED, WEATHER, turns
from data_jobs import job
from lazily import Lazily

from raypp.job.checks import check_spec
from raypp.rank.data.chat_template import ChatTemplate
from raypp.rank.data.conversations import Names
from raypp.rank.data.faults import RowFault
from raypp.rank.data.look import look_at
from raypp.rank.data.rows import Encoded, RowEncoder
from raypp.rank.data.sources import check_data, open_documents
from raypp.rank.data.tokenizer import ByteTokenizer

pa: Any = Lazily("pyarrow")
pq: Any = Lazily("pyarrow.parquet")

ROWS = Path(__file__).parent / "samples" / "rows"
CALL = '\n<call 1>{"name": "weather", "arguments": {"town": "Bern"}}</call>'
QUESTIONS = {"instruction": "question", "output": "response", "system": "system_prompt"}
PEOPLE = {"user": "customer", "assistant": ["agent", "bot"]}
SAMPLES: dict[str, tuple[dict[str, Any], list[list[str]]]] = {
    "openai-chat.jsonl": ({}, [["two"], ["here"]]),
    "openai-tools.jsonl": ({}, [[CALL, "it is mild"]] * 2),
    "openai-completions.jsonl": ({}, [[" rex∎"]]),
    "trl.jsonl": ({}, [["rex"], ["rex∎"], ["rex"], [CALL, "mild"]]),
    "axolotl-chat.jsonl": ({}, [["two"], ["two"], ["two</s>"]]),
    "axolotl-roles.jsonl": (
        {"columns": {"messages": "dialog", "role": "speaker", "content": "words"}, "roles": PEOPLE},
        [["here", "bye"]],
    ),
    "axolotl-questions.jsonl": ({"columns": QUESTIONS}, [["rex"]]),
    "alpaca.jsonl": ({}, [["rex"], ["3"]]),
    "llama-factory-alpaca.json": ({}, [["2", "3", "3"], ["rex"]]),
    "llama-factory-sharegpt.json": ({}, [[CALL, "it is mild"], ["two"]]),
    "llama-factory-pretrain.jsonl": ({"kind": "jsonl"}, [["rex is a dog∎"], ["a dog is here∎"]]),
}
"""What carries loss of each row, without the ends of turns."""


def texts(ids: Any, loss: Any) -> list[str]:
    """Returns what carries loss, as text of the bytes tokenizer; `∎` is its end."""
    parts: list[bytearray] = []
    for index, (one, carries) in enumerate(zip(ids.tolist(), loss.tolist(), strict=True)):
        if carries and (not index or not loss[index - 1]):
            parts.append(bytearray())
        if carries:
            parts[-1] += bytes([one]) if one < 256 else "∎".encode()
    return [part.decode() for part in parts]


def learnt(path: Path, folder: Path, **data: Any) -> list[list[str]]:
    train = open_documents(of(path, folder, **data)).train
    found = []
    for index in range(len(train)):
        ids, loss = train.ids(index), train.carries_loss(index)
        found.append(texts(ids, loss if loss is not None else ids >= 0))
    return [[text.removesuffix("<|im_end|>") for text in row] for row in found]


def of(path: Path, folder: Path, template: str | None = MARKED["tools"], **data: Any) -> Any:
    if template is not None and data.get("kind") != "jsonl":
        (folder / "template.jinja").write_text(template, encoding="utf-8")
        data["chat_template"] = str(folder / "template.jinja")
    asked = job(**{"kind": "chat", "path": str(path), "seq_len": 2048, **data})
    assert check_spec(asked) == []
    return asked


def encoded(row: dict[str, Any], template: str | None = CHATML, loss: Any = "assistant") -> Encoded:
    chat = ChatTemplate(template) if template is not None else None
    (found,) = RowEncoder(ByteTokenizer(), chat, loss=loss).encode([row])
    if isinstance(found, RowFault):
        raise found
    return found


def said(row: dict[str, Any], template: str | None = CHATML, loss: Any = "assistant") -> list[str]:
    found = encoded(row, template, loss)
    return [text.rstrip("\n").removesuffix("<|im_end|>") for text in texts(found.ids, found.loss)]


@pytest.mark.parametrize("name", SAMPLES)
def test_rows_of_other_trainers_are_read_as_they_mean_them(name: str, tmp_path: Path) -> None:
    data, expected = SAMPLES[name]
    assert check_data(of(ROWS / name, tmp_path, **data)) == []
    assert learnt(ROWS / name, tmp_path, **data) == expected


def test_every_sample_is_tried() -> None:
    assert {path.name for path in ROWS.iterdir()} == set(SAMPLES)


@pytest.mark.parametrize("name", ["openai-tools.jsonl", "trl.jsonl", "llama-factory-sharegpt.json"])
def test_the_same_rows_in_parquet_are_the_same(name: str, tmp_path: Path) -> None:
    data, expected = SAMPLES[name]
    text = (ROWS / name).read_text(encoding="utf-8")
    rows = json.loads(text) if text.startswith("[") else list(map(json.loads, text.splitlines()))
    alike = [row for row in rows if row.keys() == rows[-1].keys()]
    pq.write_table(pa.Table.from_pylist(alike), tmp_path / "a.parquet")
    kept = [one for row, one in zip(rows, expected, strict=True) if row in alike]
    assert learnt(tmp_path / "a.parquet", tmp_path, **{**data, "kind": "hf"}) == kept


ASKED = {"role": "user", "content": "one plus one?"}


def answers(**marks: Any) -> dict[str, Any]:
    first = {"role": "assistant", "content": "three", **marks}
    return {"messages": [ASKED, first, {"role": "user", "content": "no."}, {"role": "assistant", "content": "two"}]}


@pytest.mark.parametrize(
    ("template", "key", "value"),
    [
        (CHATML, "weight", 0), (CHATML_MARKED, "train", False), (FORGETFUL, "loss", "false"),
    ],
)  # fmt: skip
def test_a_turn_marked_as_not_to_be_learnt_is_not(template: str, key: str, value: Any) -> None:
    assert said(answers(**{key: value}), template) == ["two"]
    shared = [
        {"from": {"user": "human", "assistant": "gpt"}[turn["role"]], "value": turn["content"], **turn}
        for turn in answers(**{key: value})["messages"]
    ]
    plain = [{k: v for k, v in turn.items() if k not in ("role", "content")} for turn in shared]
    assert said({"conversations": plain}, template) == ["two"]
    without = "".join(said(answers(**{key: value}), template, "all"))
    assert "three" not in without and "one plus one?" in without and "two" in without


@pytest.mark.parametrize(
    ("marks", "what"),
    [
        ({"weight": 0.5}, r"messages\[1\] \(assistant\): weight is '0.5'; a turn is learnt"),
        ({"train": "maybe"}, "train is 'maybe'"),
        ({"loss": False, "weight": 1}, "weight and loss say the opposite"),
        ({"train_detail": [{"begin_offset": 0}]}, "train_detail is not read"),
    ],
)
def test_a_mark_that_cannot_be_meant_is_named(marks: dict[str, Any], what: str) -> None:
    with pytest.raises(RowFault, match=what):
        encoded(answers(**marks))


def test_a_row_in_which_nothing_is_left_to_learn_is_named() -> None:
    row = {"messages": [ASKED, {"role": "assistant", "content": "three", "weight": 0}]}
    with pytest.raises(RowFault, match="all its assistant turns are marked as not to be learnt"):
        encoded(row)
    with pytest.raises(RowFault, match="its last assistant turn is marked"):
        encoded({"messages": [*answers()["messages"], ASKED, row["messages"][1]]}, loss="last")
    with pytest.raises(RowFault, match=r"messages\[0\] \(user\): is marked to be learnt"):
        encoded({"messages": [{**ASKED, "train": True}, {"role": "assistant", "content": "two"}]})


@pytest.mark.parametrize("key", ["messages", "conversations"])
def test_a_system_text_beside_the_turns_is_the_first_turn(key: str) -> None:
    row = {"system": "be brief", key: turns("a", "b")}
    assert encoded(row).text == encoded({"messages": turns("a", "b", system="be brief")}).text
    assert encoded({**row, key: turns("a", "b", system="be brief")}).text == encoded(row).text
    assert encoded({**row, "system": None}).text == encoded({key: turns("a", "b")}).text
    with pytest.raises(RowFault, match="has a system text of its own beside the turns, and another"):
        encoded({**row, key: turns("a", "b", system="be kind")})
    with pytest.raises(RowFault, match="'system' is a list, not a text"):
        encoded({**row, "system": ["be brief"]})


REFUSED = [
    ({"messages": turns("a", "b"), "images": ["a.png"]}, "has 'images': raypp trains on text only"),
    ({"prompt": "a", "chosen": "b", "rejected": "c"}, "has 'chosen', 'rejected': raypp does not train on preferences"),
    ({"prompt": "a", "completion": "b", "label": True}, "has 'label': raypp does not train on preferences"),
    ({"messages": turns("a", "b"), "chat_template_kwargs": {"x": 1}}, "chat_template_kwargs"),
    ({"prompt": "a", "completion": "b", "system": "c"}, "has 'system' beside a prompt"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, r"content\[0\] is of type 'image_url'"),
    ({"segments": [{"text": "a"}]}, r"segments\[0\] is not an object with a text and a label"),
    ({"question": "a", "answer": "b"}, "nor instruction and output.*it has 'question', 'answer'"),
]


@pytest.mark.parametrize(("row", "what"), REFUSED)
def test_rows_that_raypp_does_not_train_on_are_refused_by_name(row: dict[str, Any], what: str) -> None:
    with pytest.raises(RowFault, match=what) as fault:
        encoded(row)
    assert fault.value.fix


def test_columns_that_the_job_names_decide() -> None:
    row = {"messages": turns("a", "b"), "chosen": turns("a", "c"), "rejected": turns("a", "d")}
    names = Names({"messages": "chosen"})
    (found,) = RowEncoder(ByteTokenizer(), ChatTemplate(CHATML), names=names).encode([row])
    assert isinstance(found, Encoded) and "c<|im_end|>" in found.text
    assert found.remarks == {"column messages is not used", "column rejected is not used"}


def called(arguments: Any, **more: Any) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": "weather", "arguments": arguments, **more}}
    return {"messages": [ASKED, {"role": "assistant", "content": None, "tool_calls": [call]}], "tools": [WEATHER]}


def test_arguments_as_text_are_those_as_an_object() -> None:
    by_items = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    by_items += "{% for k, v in c.function.arguments|items %}{{ k }}={{ v }};{% endfor %}{% endfor %}{% endfor %}"
    for template in (MARKED["tools"], by_items):
        text, given = (encoded(called(one), template, "all") for one in ('{"town": "Bern"}', {"town": "Bern"}))
        assert text.text == given.text and "Bern" in text.text
    assert encoded(called(""), MARKED["tools"]).text == encoded(called({}), MARKED["tools"]).text
    for bad in ("{", "[1]", "3", 3):
        with pytest.raises(RowFault, match=r"tool_calls\[0\].function.arguments is (a text that is not JSON|a|not)"):
            encoded(called(bad), MARKED["tools"])


def test_nulls_that_parquet_fills_in_are_left_out(tmp_path: Path) -> None:
    other = {
        "type": "function",
        "function": {"name": "time", "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}}},
    }
    second = called({"zone": "CET"})
    second["messages"][1]["tool_calls"][0]["function"]["name"] = "time"
    rows = [called({"town": "Bern"}), {**second, "tools": [other]}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    found = [
        open_documents(of(tmp_path / f"a.{kind}", tmp_path, kind=name)).train
        for kind, name in (("jsonl", "chat"), ("parquet", "hf"))
    ]
    texts = [[bytes(one.ids(index).tolist()).decode() for index in range(2)] for one in found]
    assert "null" not in "".join(texts[1])
    ordered = [[sorted(text) for text in one] for one in texts]  # parquet keeps an order of keys of its own
    assert ordered[0] == ordered[1]


def test_a_content_of_null_in_parquet_is_what_json_lines_give(tmp_path: Path) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    plain = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ 'content' in m }}{{ m.tool_calls }}{% endfor %}"
    calls: dict[str, Any] = {"tool_calls": [{"function": {"name": "town"}}]}
    mine: list[dict[str, Any]] = [ASKED, {"role": "assistant", "content": None, **calls}, *turns("b", "c")]
    renamed = [{"body": turn["content"], **{key: turn[key] for key in turn if key != "content"}} for turn in mine]
    theirs: list[dict[str, Any]] = [{"from": "human", "value": "a"}, {"from": "gpt", "value": None, **calls}]
    expected = render_jinja_template([mine], chat_template=plain)[0][0]
    for row, columns in (
        ({"messages": mine}, {}), ({"prompt": mine[:3], "completion": mine[3:]}, {}),
        ({"messages": renamed}, {"content": "body"}), ({"conversations": theirs}, {}),
    ):  # fmt: skip
        pq.write_table(pa.Table.from_pylist([row]), tmp_path / "a.parquet")
        asked = of(tmp_path / "a.parquet", tmp_path, plain, kind="hf", columns=columns, loss="all")
        text = bytes(open_documents(asked).train.ids(0).tolist()).decode()
        assert "conversations" in row or text == expected
        assert "<assistant>NoneTrue[" in text
    assert encoded({"messages": mine}, plain, "all").text == expected


def test_what_is_not_used_is_said_once_for_each_file(tmp_path: Path) -> None:
    row = {"id": 1, "messages": [{**ASKED, "mood": "sad"}, {"role": "assistant", "content": "two", "name": None}]}
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text("\n".join([json.dumps(row)] * 3), encoding="utf-8")
    asked = of(tmp_path / "*.jsonl", tmp_path, CHATML)
    files = [str(tmp_path / f"{name}.jsonl") for name in ("a", "b")]
    expected = [
        f"{file}: {what}"
        for file in files
        for what in ("column id is not used", "key mood of turns is not used: the chat template does not read it")
    ]
    assert list(look_at(asked, 1).remarks) == [f"{remark} (3 rows)" for remark in expected]
    table = pa.Table.from_pylist([{**row, "score": 1.5, "images": []}])
    pq.write_table(table, tmp_path / "c.parquet")
    remarks = look_at(of(tmp_path / "c.parquet", tmp_path, CHATML, kind="hf"), 1).remarks
    assert [remark.partition(": ")[2].removesuffix(" (1 row)") for remark in remarks] == [
        "column id is not used",
        "column score is not used",
        "key mood of turns is not used: the chat template does not read it",
    ]
    with_tools = encoded({"messages": turns("a", "b"), "tools": [WEATHER]})
    assert with_tools.remarks == {"column tools is not used: the chat template does not read it"}


def test_remarks_are_kept_with_what_is_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"id": 1, "messages": turns("a", "b")}), encoding="utf-8")
    inside = open_documents(of(tmp_path / "a.jsonl", tmp_path, CHATML)).remarks
    monkeypatch.setattr("raypp.rank.data.tokenised.IN_MEMORY_BYTES", 0)
    for _ in range(2):
        assert open_documents(of(tmp_path / "a.jsonl", tmp_path, CHATML)).remarks == inside != ()
