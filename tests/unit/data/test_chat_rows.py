"""A row as tokens with their loss, compared with transformers."""

import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_samples import CALLING, CHATML, CHATML_MARKED, FORGETFUL, MARKED, WEATHER, turns, write_tokenizer

from raypp.job.job import DataSection
from raypp.rank.data.chat_files import open_template
from raypp.rank.data.chat_template import ChatTemplate
from raypp.rank.data.conversations import Names
from raypp.rank.data.faults import RowFault
from raypp.rank.data.rows import Encoded, Loss, RowEncoder
from raypp.rank.data.tokenizer import ByteTokenizer, FileTokenizer

CONVERSATIONS = [
    turns("Hello", "Good day to you."),
    turns("the weather?", " It is fine. \n", "and the sun?", "é 😀 it is out", system="Be <brief> & kind."),
]


def encoded(
    row: dict[str, Any], template: str | None = CHATML, loss: Loss = "assistant", names: Names | None = None
) -> Encoded:
    (found,) = encoder(template, loss, names).encode([row])
    if isinstance(found, RowFault):
        raise found
    return found


def encoder(template: str | None = CHATML, loss: Loss = "assistant", names: Names | None = None) -> RowEncoder:
    return RowEncoder(ByteTokenizer(), ChatTemplate(template) if template is not None else None, loss, names)


def learnt(found: Encoded) -> list[str]:
    """Returns what carries loss, piece by piece, as text of the bytes tokenizer; `∎` is its end."""
    changes = np.flatnonzero(np.diff(np.concatenate(([False], found.loss, [False])).astype(int)))
    return [
        bytes(i for i in found.ids[a:b] if i < 256).decode() + "∎" * int((found.ids[a:b] == 256).sum())
        for a, b in zip(changes[::2], changes[1::2], strict=True)
    ]


def assert_as_transformers(folder: Path, ours: RowEncoder, rows: list[dict[str, Any]]) -> None:
    """Compares ids and loss with those of the tokenizer in a folder."""
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folder)
    for row, found in zip(rows, ours.encode(rows), strict=True):
        assert isinstance(found, Encoded), found
        expected = theirs.apply_chat_template(
            row["messages"], tools=row.get("tools"), return_dict=True, return_assistant_tokens_mask=True
        )
        assert found.ids.tolist() == expected["input_ids"]
        assert found.loss.astype(int).tolist() == expected["assistant_masks"]
        assert 0 < found.loss.sum() < len(found.loss)


@pytest.mark.parametrize("name", MARKED)
@pytest.mark.parametrize("prefixed", [False, True])
def test_marked_templates_give_what_transformers_gives(name: str, prefixed: bool, tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path, ("{# with a comment #}" if prefixed else "") + MARKED[name])
    data = DataSection(tokenizer=str(path), template_date=f"{datetime.now():%Y-%m-%d}")
    rows: list[dict[str, Any]] = [{"messages": messages} for messages in CONVERSATIONS]
    if name == "tools":
        rows += [{"messages": CALLING, "tools": [WEATHER]}, {"messages": CALLING}]
    assert_as_transformers(tmp_path, RowEncoder(FileTokenizer(path), open_template(data)), rows)


def test_conversations_with_tools_have_the_template_for_tools_wherever_it_is(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(CHATML_MARKED, encoding="utf-8")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(MARKED["tools"], encoding="utf-8")
    ours = RowEncoder(FileTokenizer(path), open_template(DataSection(tokenizer=str(path))))
    rows: list[dict[str, Any]] = [{"messages": CALLING, "tools": [WEATHER]}, {"messages": CONVERSATIONS[1]}]
    assert_as_transformers(tmp_path, ours, rows)
    assert "weather" in ours.encode(rows[:1])[0].text


def test_unmarked_templates_give_the_ids_of_transformers_and_loss_by_prefix(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    path = write_tokenizer(tmp_path, CHATML)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    ours = RowEncoder(FileTokenizer(path), open_template(DataSection(tokenizer=str(path))))
    for messages, found in zip(CONVERSATIONS, ours.encode([{"messages": m} for m in CONVERSATIONS]), strict=True):
        assert isinstance(found, Encoded)
        assert found.ids.tolist() == theirs.apply_chat_template(messages)["input_ids"]
        said = "".join(f"{m['content']}<|im_end|>\n" for m in messages if m["role"] == "assistant")
        assert theirs.decode(found.ids[found.loss]) == said


def test_a_template_has_the_special_tokens_of_special_tokens_map_as_in_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    path = write_tokenizer(
        tmp_path, "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}"
    )
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    tokens = {name: config.pop(name) for name in ("bos_token", "eos_token")}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(tokens))
    (found,) = RowEncoder(FileTokenizer(path), open_template(DataSection(tokenizer=str(path)))).encode(
        [{"messages": CONVERSATIONS[0]}]
    )
    assert isinstance(found, Encoded)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert found.ids.tolist() == theirs.apply_chat_template(CONVERSATIONS[0])["input_ids"]
    assert found.text.startswith("<s>") and "</s>" in found.text


@pytest.mark.parametrize("name", MARKED)
def test_prefixes_find_what_marks_find(name: str, tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path)
    unmarked = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", MARKED[name])
    data = DataSection(tokenizer=str(path), template_date="2026-01-31")
    today, special = datetime(2026, 1, 31), {"bos_token": "<s>", "eos_token": "</s>"}
    tokenizer = FileTokenizer(path)
    assert open_template(data) is None
    by_marks, by_prefix = (
        RowEncoder(tokenizer, ChatTemplate(source, special, today)) for source in (MARKED[name], unmarked)
    )
    rows: list[dict[str, Any]] = [{"messages": messages} for messages in CONVERSATIONS]
    rows += [{"messages": CALLING, "tools": [WEATHER]}] * (name == "tools")
    for marked, prefixed in zip(by_marks.encode(rows), by_prefix.encode(rows), strict=True):
        assert isinstance(marked, Encoded) and isinstance(prefixed, Encoded), prefixed
        assert marked.text.split() == prefixed.text.split()
        more = ["<|im_start|>assistant\n", "\n"] if name in ("tools", "chatml") else [""]
        said = [tokenizer.shown(one.ids[one.loss].tolist()) for one in (marked, prefixed)]
        for header in more:  # no generation prompt; a line feed ends each turn
            said = [text.replace(header, "") for text in said]
        assert said[0] == said[1]


def test_loss_is_on_all_assistant_turns_the_last_or_everything() -> None:
    row = {"messages": turns("a?", "b.", "c?", "d.")}
    assert learnt(encoded(row)) == ["b.<|im_end|>\n", "d.<|im_end|>\n"]
    assert learnt(encoded(row, loss="last")) == ["d.<|im_end|>\n"]
    assert encoded(row, loss="all").loss.all()
    assert learnt(encoded(row, MARKED["chatml"])) == ["b.<|im_end|>", "d.<|im_end|>"]
    assert learnt(encoded(row, MARKED["chatml"], "last")) == ["d.<|im_end|>"]


def test_text_is_a_row_only_where_its_column_is_given() -> None:
    assert learnt(encoded({"text": "hi"}, None, names=Names({"text": "text"}))) == ["hi∎"]
    with pytest.raises(RowFault, match=r"has neither messages.*it has 'text'"):
        encoded({"text": "hi"})


def test_turns_of_a_template_that_drops_earlier_reasoning_are_what_its_loop_writes() -> None:
    row = {"messages": turns("a?", "hm</think>b.", "c?", "d.")}
    found = encoded(row, FORGETFUL)
    assert learnt(found) == ["b.<|im_end|>\n", "d.<|im_end|>\n"] and "hm" not in found.text
    assert any("writes earlier turns otherwise" in remark for remark in found.remarks)
    assert learnt(encoded(row, FORGETFUL, "last")) == ["d.<|im_end|>\n"]


def test_a_template_that_cannot_mark_turns_is_refused_with_what_to_do() -> None:
    row = {"messages": turns("a?", "hm</think>b.", "c?", "d.")}
    hidden = "{% macro all() %}" + FORGETFUL + "{% endmacro %}{{ all() }}"
    with pytest.raises(RowFault, match=r"cannot mark turns: messages\[:2\] alone is not rendered as") as fault:
        encoded(row, hidden)
    assert "generation" in fault.value.fix and "data.loss" in fault.value.fix
    assert learnt(encoded(row, hidden, "last")) == ["d.<|im_end|>\n"]


def test_today_is_refused_until_the_job_says_which_day() -> None:
    with pytest.raises(RowFault, match=r"line 1 of the chat template: asks for the date.*data\.template_date"):
        encoded({"messages": turns("a", "b")}, MARKED["headers"])


WRONG = [
    ({}, "has no keys"),
    ({"prompt": ["a"], "completion": "b"}, "'prompt' is a list, not a text"),
    ({"messages": []}, "messages is empty"),
    ({"messages": ["hi"]}, r"messages\[0\] is a text, not an object"),
    ({"messages": [{"content": "a"}]}, r"messages\[0\] has no role \(it has 'content'\)"),
    (
        {"messages": [{"role": "wizard", "content": "a"}]},
        r"messages\[0\]: there is no role 'wizard'; there are: system",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, r"\(user\): content\[0\] is not a text"),
    ({"messages": [{"role": "assistant", "content": None}]}, "content is null"),
    ({"messages": turns("only a question")}, "has no assistant turn"),
    ({"messages": turns("a", "b") * 2000}, "4,000 turns; at most 2,000"),
    ({"messages": turns("a", "b"), "tools": "{"}, "tools is a text that is not JSON"),
    ({"messages": turns("a", "b"), "tools": [1]}, "not a list of objects"),
    ({"messages": turns("a", "\ud800")}, "not valid Unicode"),
    ({"conversations": [{"from": "narrator", "value": "a"}]}, "there is no from 'narrator'; there are: system, human"),
]


@pytest.mark.parametrize(("row", "what"), WRONG)
def test_what_is_wrong_with_a_row_is_said(row: dict[str, Any], what: str) -> None:
    with pytest.raises(RowFault, match=what) as fault:
        encoded(row)
    assert fault.value.fix


def test_one_bad_row_does_not_hide_the_others() -> None:
    good = {"messages": turns("a", "b")}
    first, bad, last = encoder().encode([good, {"messages": []}, good])
    assert isinstance(bad, RowFault) and isinstance(first, Encoded) and isinstance(last, Encoded)
    assert first.ids.tolist() == last.ids.tolist()
