"""Tests mixtures: which part each row comes from, budgets, positions, and what is refused."""

import json
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from data_jobs import as_lists, data_identity, job, loading, rows_of

from raypp.errors import DataError, JobError
from raypp.job.checks import check_spec
from raypp.job.job import Job
from raypp.rank.data.loader import check_budgets, open_loader, order_of
from raypp.rank.data.sources import check_data, open_documents
from raypp.state.checkpoint.commit import read_extra


@pytest.fixture
def parts(tmp_path: Path) -> list[dict[str, Any]]:
    """Two texts, one of a's and one of b's."""
    for letter, count in (("a", 40), ("b", 60)):
        (tmp_path / f"{letter}.txt").write_text("\n\n".join(letter * (i % 29 + 3) for i in range(count)))
    return [{"weight": 2, "path": f"{tmp_path}/a.txt"}, {"weight": 1, "path": f"{tmp_path}/b.txt"}]


def mixed(parts: list[dict[str, Any]], *, steps: int = 50, **data: Any) -> Job:
    made = job(kind="mixture", parts=parts, seq_len=32, **data)
    return made.model_copy(update={"train": made.train.model_copy(update={"steps": steps})})


def letters(rows: Any) -> str:
    """Returns the part of each row; no row has documents of two."""
    found = [set(row.tokens.tolist()) - {256} for row in rows]
    assert all(len(one) == 1 for one in found)
    return "".join(chr(one.pop()) for one in found)


def test_rows_follow_the_weights_at_every_point(parts: list[dict[str, Any]]) -> None:
    with loading(mixed(parts)) as loader:
        found = letters(rows_of(loader.next_step() for _ in range(50)))
    assert found.startswith("abaaba")
    for length in range(1, len(found) + 1):
        assert abs(found[:length].count("a") - 2 * length / 3) < 1


def test_weights_are_exact_whatever_their_digits(parts: list[dict[str, Any]]) -> None:
    three = [{**parts[0], "weight": 0.1}, {**parts[1], "weight": 0.7}, {**parts[1], "weight": 0.2}]
    order = order_of(open_documents(mixed(three)), mixed(three))
    last = next(islice(order.rows(order.start), 999, None))[1]
    assert [one.rows for one in last] == [100, 700, 200]


def test_a_phase_changes_the_weights_from_its_step_on_whatever_was_given_before(parts: list[dict[str, Any]]) -> None:
    named = [{**part, "name": name} for part, name in zip(parts, "ab", strict=True)]
    phases = [{"from_step": 11, "weights": {"a": 0}}, {"from_step": 21, "weights": {"a": 1, "b": 4}}]
    asked = mixed(named, phases=phases)
    with loading(asked) as loader:
        found = letters(rows_of(loader.next_step() for _ in range(50)))
    each = asked.rows_per_step
    first, second, third = found[: 10 * each], found[10 * each : 20 * each], found[20 * each :]
    assert abs(first.count("a") - 20 * each / 3) < 1 and set(second) == {"b"}
    assert third.startswith("bbabb") and abs(third.count("a") - 30 * each / 5) < 1


def test_phases_must_come_in_order_and_name_parts(parts: list[dict[str, Any]]) -> None:
    def found(*phases: dict[str, Any]) -> list[str]:
        asked = mixed([{**parts[0], "name": "a"}, parts[1]], phases=[*phases])
        return [f"{one.key}: {one.fault}" for one in check_spec(asked)]

    assert found({"from_step": 5, "weights": {"a": 3}}) == []
    assert found({"from_step": 5, "weights": {"a": 3}}, {"from_step": 5, "weights": {"a": 1}}) == [
        "data.phases[1].from_step: 5 is not after 5, where the phase before begins"
    ]
    assert "51 is after the last of 50 steps" in found({"from_step": 51, "weights": {"a": 3}})[0]
    (unknown,) = found({"from_step": 5, "weights": {"b": 3}})
    assert "no part is named 'b'; named are: a" in unknown
    only = mixed([{**parts[0], "name": "a"}], phases=[{"from_step": 5, "weights": {"a": 0}}])
    assert "all weights are 0" in check_spec(only)[0].fault


def test_a_part_listed_twice_has_two_orders(parts: list[dict[str, Any]]) -> None:
    twice = mixed([{**parts[0], "weight": 1}] * 2)
    assert check_spec(twice) == []
    with loading(twice) as loader:
        rows = as_lists(rows_of(loader.next_step() for _ in range(2)))
        names = {f"data.{part}.{what}" for part in ("a", "a-2") for what in ("epochs", "rows", "tokens")}
        assert set(loader.used()) == names
    assert rows[0::2] != rows[1::2]


@pytest.mark.parametrize("replicas", [2, 4])
def test_the_replicas_together_read_what_one_process_reads(parts: list[dict[str, Any]], replicas: int) -> None:
    def read(replica: int, replicas: int) -> list[Any]:
        asked = mixed([{**parts[0], "epochs": 1.5}, parts[1]])
        asked = asked.model_copy(update={"pipeline": asked.pipeline.model_copy(update={"microbatches": 4 // replicas})})
        with loading(asked, replica, replicas) as loader:
            return [[as_lists(rows_of([loader.next_step()])), loader.position(), loader.used()] for _ in range(12)]

    alone, shares = read(0, 1), [read(replica, replicas) for replica in range(replicas)]
    for step, (rows, *rest) in enumerate(alone):
        assert [row for share in shares for row in share[step][0]] == rows
        assert all(share[step][1:] == rest for share in shares)


def test_a_sought_mixture_goes_on_as_if_nothing_had_been(parts: list[dict[str, Any]]) -> None:
    phases = [{"from_step": 8, "weights": {"a": 0}}, {"from_step": 12, "weights": {"a": 5}}]
    asked = mixed([{**parts[0], "tokens": 300, "name": "a"}, parts[1]], phases=phases)
    for before in (0, 1, 5, 9, 20):
        with loading(asked) as first, loading(asked) as second:
            for _ in range(before):
                first.next_step()
            extra = read_extra(json.loads(json.dumps({"data_position": first.position()})), "COMMIT")
            assert extra.data_position is not None
            second.seek(json.loads(json.dumps(first.position())))
            assert (second.position(), second.used()) == (first.position(), first.used())
            for _ in range(6):
                assert as_lists(rows_of([first.next_step()])) == as_lists(rows_of([second.next_step()]))


def test_budgets_end_a_part_and_the_others_go_on(parts: list[dict[str, Any]]) -> None:
    with loading(mixed([{**parts[0], "epochs": 1}, {**parts[1], "tokens": 100, "name": "b-part"}, parts[1]])) as loader:
        rows = rows_of(loader.next_step() for _ in range(50))
        used = loader.used()
    documents = open_documents(mixed([parts[0]])).train
    total = int(documents.lengths().sum())
    assert used["data.a.tokens"] == total and used["data.a.epochs"] == 1.0
    assert 100 <= used["data.b-part.tokens"] < 100 + 32
    seen = Counter(token for row in rows for token in row.tokens.tolist() if token == ord("a"))
    assert seen[ord("a")] == total - len(documents)
    assert letters(rows)[-20:] == "b" * 20
    assert sum(used[f"data.{name}.rows"] for name in ("a", "b-part", "b")) == len(rows) == 200


def test_budgets_that_do_not_last_are_an_error_that_names_the_step(parts: list[dict[str, Any]]) -> None:
    short = [{**parts[0], "epochs": 1}, {**parts[1], "epochs": 2}]
    order = order_of(open_documents(mixed(short)), mixed(short))
    rows = order.rows_until(10**6)
    assert len(list(islice(order.rows(order.start), rows))) == rows
    with pytest.raises(DataError, match="are spent after"):
        next(islice(order.rows(order.start), rows, None))
    last = rows // 4
    open_loader(mixed(short, steps=last), 0, 1).close()
    with pytest.raises(
        DataError, match=rf"are spent in step {last + 1} of {last + 1}: they give {rows} rows"
    ) as caught:
        open_loader(mixed(short, steps=last + 1), 0, 1)
    assert f"train.steps to {last}" in caught.value.problems[0].fix
    assert check_budgets(mixed(short, steps=last)) == []
    assert [problem.key for problem in check_budgets(mixed(short, steps=last + 1))] == ["data.parts"]


def test_a_changed_part_is_named(parts: list[dict[str, Any]], tmp_path: Path) -> None:
    with loading(mixed(parts)) as loader:
        loader.next_step()
        position = loader.position()

    def said(changed: list[dict[str, Any]], **data: Any) -> str:
        with loading(mixed(changed, **data)) as other, pytest.raises(JobError, match="other data") as caught:
            other.seek(position)
        return caught.value.problems[0].fault

    (tmp_path / "c.txt").write_text("ccc\n\ncc")
    assert "(data.parts[1] (c): other documents)" in said([parts[0], {**parts[1], "path": f"{tmp_path}/c.txt"}])
    assert "(data.parts[0] (a): weight 2, now 3)" in said([{**parts[0], "weight": 3}, parts[1]])
    assert "(data.parts[1] (b): tokens budget none, now 7)" in said([parts[0], {**parts[1], "tokens": 7}])
    assert "2 parts, now 1" in said(parts[:1])
    assert data_identity(mixed(parts)) == data_identity(mixed([{**parts[0], "name": "other"}, parts[1]]))
    with loading(job(kind="text", path=parts[0]["path"])) as single:
        with pytest.raises(JobError, match="other data"):
            single.seek(position)
        position = single.position()
    assert "a single source, now a mixture" in said(parts)


def test_a_fraction_of_every_part_is_held_out(parts: list[dict[str, Any]]) -> None:
    asked = mixed(parts, eval={"fraction": 0.1})
    documents = open_documents(asked)
    assert documents.held_out is not None and len(documents.held_out) == 10 and len(documents.train) == 90
    with loading(asked) as loader:
        held = {letter for row in rows_of(loader.held_out()) for letter in row.tokens.tolist()}
        assert held == {ord("a"), ord("b"), 256}


def problems(**data: Any) -> list[str]:
    return [f"{problem.key}: {problem.fault}" for problem in check_spec(job(**data))]


def test_what_cannot_be_mixed_is_refused(parts: list[dict[str, Any]]) -> None:
    mixture = {"kind": "mixture"}
    assert problems(**mixture) == ["data.parts: is missing: a mixture has parts"]
    assert problems(**mixture, parts=[]) == ["data.parts: is empty"]
    (found,) = problems(**mixture, parts=[parts[0], {"kind": "mixture"}])
    assert found == "data.parts[1].kind: a mixture cannot be a part of a mixture"
    (found,) = problems(**mixture, parts=[{**parts[0], "kind": "txt"}])
    assert found.startswith("data.parts[0].kind: there is no 'txt'; there are: text")
    assert "data.parts[0].tokens: epochs are given, too" in problems(
        **mixture, parts=[{**parts[0], "epochs": 1, "tokens": 1}]
    )
    assert problems(**mixture, parts=[{"kind": "text"}]) == ["data.parts[0].path: is missing: kind text reads files"]
    (found,) = problems(**mixture, parts=[{"path": "/none.txt"}])
    assert found == "data.parts[0].path: there is no /none.txt"
    assert len(problems(**mixture, parts=[{**parts[0], "name": "x"}, {**parts[1], "name": "x"}])) == 2
    assert problems(**mixture, parts=parts, path="x") == ["data.path: a mixture has no path of its own"]
    assert problems(kind="text", path=parts[0]["path"], parts=parts) == ["data.parts: kind text has no parts"]
    assert problems(**mixture, parts=parts, eval={"path": parts[0]["path"]})


def test_an_empty_part_is_named(parts: list[dict[str, Any]], tmp_path: Path) -> None:
    (tmp_path / "blank.txt").write_text("\n\n")
    (tmp_path / "none.txt").touch()
    with pytest.raises(DataError, match=r"data\.parts\[1\]\.path: .*blank.txt contains no documents"):
        open_documents(mixed([parts[0], {"path": f"{tmp_path}/blank.txt"}]))
    (found,) = check_data(mixed([parts[0], {"path": f"{tmp_path}/none.txt"}]))
    assert found.key == "data.parts[1].path" and found.fault.endswith("is empty")


def test_texts_and_synthetic_documents_share_the_tokenizer(parts: list[dict[str, Any]]) -> None:
    synthetic = {"kind": "synthetic", "num_documents": 10, "document_len": [4, 9]}
    train = open_documents(mixed([parts[0], synthetic])).train
    assert all(int(train.ids(index)[-1]) == 256 for index in range(len(train)))
    only = open_documents(mixed([synthetic]))
    assert only.tokenizer.eos_id == 319
