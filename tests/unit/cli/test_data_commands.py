"""raypp data show: what it prints, and its JSON."""

import json
from pathlib import Path

import pytest

from raypp.cli.main import run

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setenv("COLUMNS", "80")


def test_rows_are_shown_with_their_loss_and_all_documents_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["data", "show", "jobs/chat.yaml", "--rows", "1", "--set", "data.seq_len=128"]) == 0
    printed = capsys.readouterr().out
    assert "row 1: 1" in printed and "of 128 tokens" in printed
    assert "▌ " in printed and "<|im_end|>»" in printed and "«<|im_start|>" not in printed
    assert "24 of 48 documents have more than 128 tokens and are cut into pieces" in " ".join(printed.split())
    assert "27.5% of them carry loss" in printed
    assert "5,025 of 6,934 tokens are not trained on: 5,025 carry no loss" in " ".join(printed.split())
    assert max(map(len, printed.splitlines())) <= 80


def test_json_holds_the_ids_and_the_loss_of_the_rows(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["data", "show", "jobs/chat.yaml", "--rows", "3", "--json", "--set", "data.too_long=drop"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["documents"] == 48 and found["too_long"] == {"documents": 0, "are": "dropped"}
    assert sum(one["documents"] for one in found["lengths"]) == 48
    assert len(found["first_rows"]) == 3
    assert found["not_trained"] == {"masked": found["tokens"] - found["loss_tokens"], "too_long": 0, "held_out": 0}
    for piece in (piece for row in found["first_rows"] for piece in row):
        learnt = bytes(i for i, loss in zip(piece["ids"], piece["loss"], strict=True) if loss).decode()
        assert learnt.endswith("<|im_end|>") and "<|im_start|>" not in learnt


def test_the_same_rows_are_shown_that_a_run_reads_first(capsys: pytest.CaptureFixture[str]) -> None:
    from raypp.job.job_file import load_job
    from raypp.rank.data.loader import open_loader

    assert run(["data", "show", "jobs/chat.yaml", "--rows", "2", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["first_rows"]
    loader = open_loader(load_job("jobs/chat.yaml").job, 0, 1)
    rows = loader.next_step()[0].rows
    loader.close()
    assert [[i for piece in row for i in piece["ids"]] for row in shown] == [row.tokens.tolist() for row in rows]


def test_a_plan_looks_at_the_first_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
    (tmp_path / "a.jsonl").write_text(good * 3 + '{"messages": [{"role": "mage", "content": "a"}]}\n' * 9)
    assert run(["plan", "jobs/chat.yaml", "--set", f"data.path={tmp_path}/a.jsonl"]) == 2
    printed = capsys.readouterr().err
    assert "a.jsonl:4: messages[0]: there is no role 'mage'" in printed and "6 more rows cannot be used" in printed
    assert run(["plan", "jobs/chat.yaml", "--set", "data.chat_template=none.jinja"]) == 2
    assert "data.chat_template=none.jinja: there is no none.jinja" in capsys.readouterr().err


def test_each_part_of_a_mixture_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo")
    (tmp_path / "b.txt").write_text("three")
    parts = "[{kind: text, path: a.txt}, {kind: text, path: b.txt, name: others}]"
    (tmp_path / "job.yaml").write_text(f"name: mixed\ndata: {{kind: mixture, parts: {parts}}}\n")
    assert run(["data", "show", str(tmp_path / "job.yaml")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "a 2 documents, 8 tokens others 1 documents, 6 tokens" in said
    assert run(["data", "show", str(tmp_path / "job.yaml"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["parts"]
    assert found == [{"name": "a", "documents": 2, "tokens": 8}, {"name": "others", "documents": 1, "tokens": 6}]
