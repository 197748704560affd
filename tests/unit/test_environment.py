"""What must be installed where, and what is said when it is not."""

import json
import re
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hostile_world as hostile
import pytest

from raypp import environment
from raypp.control.clusters.dashboard import Dashboard
from raypp.environment import OLDEST, check_node, is_older, need, too_old
from raypp.errors import JobError, UnreachableError

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


def named(requirements: list[str]) -> dict[str, str]:
    found = (re.fullmatch(r"([A-Za-z0-9_-]+)(?:\[\w+\])?>=([\d.]+)", text) for text in requirements)
    return {match[1]: match[2] for match in found if match}


def test_the_oldest_versions_are_those_of_the_project() -> None:
    node = named(PROJECT["optional-dependencies"]["node"])
    assert {
        "python": PROJECT["requires-python"].removeprefix(">="),
        "ray": node["ray"],
        "torch": node["torch"],
    } == OLDEST
    assert set(environment.ON_NODES) <= node.keys() | named(PROJECT["dependencies"]).keys()
    assert not {"torch", "ray"} & named(PROJECT["dependencies"]).keys()


@pytest.mark.parametrize(
    ("version", "older"),
    [("2.9.1+cpu", True), ("2.10", True), ("2.11", False), ("2.11.0a0+git1", False), ("3.0", False), ("odd", False)],
)
def test_versions_are_compared_by_their_numbers(version: str, older: bool) -> None:
    assert is_older(version, "2.11") is older


def test_a_missing_package_names_its_extra() -> None:
    need("numpy", "node", "raypp parity")
    with pytest.raises(JobError, match=r"raypp parity: needs no_such, .*\n.*pip install 'raypp\[node\]'"):
        need("no_such", "node", "raypp parity")
    there = r"--tasks: needs no_such, which is not installed on node n7\n  fix: pip install 'raypp\[eval\]' there, into"
    with pytest.raises(JobError, match=there):
        need("no_such", "eval", "--tasks", "n7")


def test_what_a_node_lacks_is_named_together(monkeypatch: pytest.MonkeyPatch) -> None:
    check_node("node a")
    monkeypatch.setattr(environment, "ON_NODES", ("torch", "no-such-one", "no-such-two"))
    monkeypatch.setattr(environment, "OLDEST", {"torch": "99.0"})
    with pytest.raises(JobError) as caught:
        check_node("node a")
    said = str(caught.value)
    assert "node a: no-such-one, no-such-two are not installed" in said
    assert "(raypp needs 99.0 or newer)" in said and "install `raypp[node]` there" in said
    assert too_old({"torch": "", "python": "3.1"}) == ""


@contextmanager
def dashboard(answers: dict[str, Any]) -> Iterator[Dashboard]:
    def respond(_: str, path: str, __: bytes) -> tuple[int, bytes]:
        return 200 if path in answers else 404, json.dumps(answers.get(path)).encode()

    with hostile.answering(respond) as url:
        yield Dashboard(url)


def of_cluster(ray: str, python: str | None) -> dict[str, Any]:
    metadata = {"/api/v0/cluster_metadata": {"result": True, "data": {"rayVersion": ray, "pythonVersion": python}}}
    return {"/api/version": {"ray_version": ray}} | (metadata if python else {})


def test_the_versions_of_a_cluster_are_compared_with_what_raypp_needs() -> None:
    with dashboard(of_cluster("2.60.0", "3.11.9")) as found:
        assert found.check_versions() == {"ray": "2.60.0", "python": "3.11.9"}
    with dashboard(of_cluster("2.60.0", None)) as found:
        assert found.check_versions() == {"ray": "2.60.0"}
    for odd in ([], {"data": None}, {"data": ["x"]}):
        with dashboard({**of_cluster("2.60.0", None), "/api/v0/cluster_metadata": odd}) as found:
            assert found.check_versions()["ray"] == "2.60.0"
    with dashboard(of_cluster("2.9.3", "3.10.4")) as found, pytest.raises(UnreachableError) as caught:
        found.check_versions()
    said = str(caught.value)
    assert "has python 3.10.4 (raypp needs 3.11 or newer), ray 2.9.3 (raypp needs 2.50 or newer)" in said
