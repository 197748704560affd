"""A user's own modules travel with the job. Installed modules do not."""

import sys
from pathlib import Path
from typing import Any

import pytest

from raypp.job.availability import own_files
from raypp.job.checks import check_spec
from raypp.job.job import Job
from raypp.job.job_file import load_job
from raypp.job.load import parse_job


def job(**sections: Any) -> Job:
    return parse_job({"name": "a", "data": {"kind": "synthetic"}, **sections})


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_order.py").write_text("def build(): ...\n")
    (tmp_path / "my_parts" / "deep").mkdir(parents=True)
    for name in ("__init__.py", "deep/__init__.py", "deep/rows.py", "facts.json", "notes.txt"):
        (tmp_path / "my_parts" / name).write_text(f"# {name}\n" if name != "facts.json" else "{}")
    (tmp_path / "my_parts" / "deep" / "broken.py").write_text("raise RuntimeError('it is not imported')\n")
    return tmp_path


def test_a_module_travels_alone_and_a_package_as_a_whole(own: Path) -> None:
    found = own_files(
        job(pipeline={"schedule": "my_order:build"}, train={"optimizer": {"kind": "my_parts.deep.broken:build"}})
    )
    assert [name for name, _ in found] == [
        "my_order.py",
        "my_parts/__init__.py",
        "my_parts/deep/__init__.py",
        "my_parts/deep/broken.py",
        "my_parts/deep/rows.py",
    ]
    assert dict(found)["my_order.py"] == b"def build(): ...\n"


def test_other_files_of_a_package_travel_only_if_it_lists_them(own: Path) -> None:
    asked = job(train={"optimizer": {"kind": "my_parts.deep.broken:build"}})
    (own / "my_parts" / "service-account.json").write_text('{"private_key": "x"}')
    assert not [name for name, _ in own_files(asked) if not name.endswith(".py")]
    (own / "my_parts" / "travels.txt").write_text("facts.json\n../my_order.py\n")
    assert [name for name, _ in own_files(asked) if not name.endswith(".py")] == ["my_parts/facts.json"]


def test_source_that_is_no_python_is_reported_with_its_line_before_it_is_imported(own: Path) -> None:
    (own / "my_order.py").write_text("def build():\n    return (\n")
    (own / "my_parts" / "__init__.py").write_text("1 / 0\n")
    asked = job(pipeline={"schedule": "my_order:build"}, data={"kind": "my_parts.deep.rows:read"})
    reported = {problem.key: problem.fault for problem in check_spec(asked)}
    assert f"SyntaxError: '(' was never closed (at {own}/my_order.py:2: return (" in reported["pipeline.schedule"]
    assert f"ZeroDivisionError: division by zero (at {own}/my_parts/__init__.py:1 in" in reported["data.kind"]


@pytest.mark.parametrize(
    "schedule", ["1f1b", "json.decoder:build", "yaml.nodes:build", "raypp.planning.schedules.zbv:build"]
)
def test_what_every_node_has_does_not_travel(schedule: str) -> None:
    assert own_files(job(pipeline={"schedule": schedule})) == []


def test_a_table_is_read_where_it_is_and_a_missing_module_is_reported_elsewhere() -> None:
    assert own_files(job(pipeline={"schedule": "mine.csv"}, data={"kind": "no_such_module:read"})) == []


def test_a_module_is_found_beside_the_job_that_names_it_and_by_no_other_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    text = "name: a\ndata: {kind: synthetic}\npipeline: {schedule: 'order_beside:build'}\n"
    for name in ("one", "two", "none"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "job.yaml").write_text(text)
        if name != "none":
            (tmp_path / name / "order_beside.py").write_text(f"# {name}\n")
    for name in ("one", "two"):
        assert own_files(load_job(tmp_path / name / "job.yaml").job) == [("order_beside.py", f"# {name}\n".encode())]
    assert own_files(load_job(tmp_path / "none" / "job.yaml").job) == []
    monkeypatch.syspath_prepend(tmp_path / "one")  # PYTHONPATH comes first
    assert own_files(load_job(tmp_path / "two" / "job.yaml").job) == [("order_beside.py", b"# one\n")]
