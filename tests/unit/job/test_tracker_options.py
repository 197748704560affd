"""The trackers of a job: how they are written, and what is refused before a run."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from raypp.errors import JobError, Problem
from raypp.job.availability import own_files
from raypp.job.checks import check_spec
from raypp.job.explain import explain, schema
from raypp.job.job import Job
from raypp.job.load import job_document, parse_job
from raypp.job.trackers import missing_for_trackers, tracker_variables
from raypp.kinds import TRACKERS

ROOT = Path(__file__).parents[3]
OFFLINE = {"kind": "wandb", "options": {"mode": "offline"}}


def job(*trackers: Any, **sections: Any) -> Job:
    return parse_job({"name": "a", "data": {"kind": "synthetic"}, "observe": {"trackers": list(trackers)}, **sections})


def shown(problems: list[Problem]) -> dict[str, str]:
    return {problem.key: f"{problem.fault} | {problem.fix}" for problem in problems}


def test_a_tracker_is_a_word_or_a_kind_with_options() -> None:
    mixed = job("tensorboard", OFFLINE)
    assert check_spec(mixed) == []
    assert [one.kind for one in mixed.observe.trackers] == ["tensorboard", "wandb"]
    assert parse_job(job_document(mixed)) == mixed
    assert job().observe.trackers == []


@pytest.mark.parametrize(
    ("tracker", "key", "reported"),
    [
        ("tensorbord", "[0].kind", "there is no 'tensorbord'; there are: tensorboard, wandb, mlflow"),
        ("my.module:track", "[0].kind", "cannot import 'my.module'"),
        ({"kind": "wandb", "options": {"projet": "x"}}, "[0].options.projet", "unknown option | did you mean project?"),
        ({"kind": "mlflow", "options": {"zzz": "x"}}, "[0].options.zzz", "there are: uri, experiment"),
        ({"kind": "tensorboard", "options": {"dir": "logs"}}, "[0].options.dir", "logs is relative"),
        ({"kind": "mlflow", "options": {"uri": "http://me:pw@host"}}, "[0].options.uri", "MLFLOW_TRACKING_PASSWORD"),
    ],
)
def test_a_mistake_is_named_with_its_key(tracker: Any, key: str, reported: str) -> None:
    found = shown(check_spec(job(tracker)))
    assert reported in found[f"observe.trackers{key}"]


def test_a_tracker_is_listed_once() -> None:
    assert "wandb is listed twice" in shown(check_spec(job("wandb", OFFLINE)))["observe.trackers[1]"]


@pytest.mark.parametrize(
    ("tracker", "environment", "reported"),
    [
        ("wandb", {}, "WANDB_API_KEY is not set | set WANDB_API_KEY"),
        ("wandb", {"WANDB_MODE": "offline"}, ""),
        (OFFLINE, {}, ""),
        ({"kind": "wandb", "options": {"mode": "of"}}, {}, "must be online or offline"),
        ("mlflow", {}, "MLFLOW_TRACKING_URI is not set | set MLFLOW_TRACKING_URI to your server; offline, use a file"),
        ("mlflow", {"MLFLOW_TRACKING_URI": "http://h"}, ""),
        ({"kind": "mlflow", "options": {"uri": "sqlite:////m.db"}}, {}, ""),
        ("tensorboard", {}, ""),
    ],
)
def test_what_is_missing_is_known_before_the_run(tracker: Any, environment: dict[str, str], reported: str) -> None:
    found = shown(missing_for_trackers(job(tracker), environment, here=False))
    assert reported in "".join(found.values()) if reported else found == {}


def test_a_key_of_the_job_s_environment_counts() -> None:
    keyed = job("wandb", resources={"env": {"WANDB_API_KEY": "k"}})
    assert missing_for_trackers(keyed, {}, here=False) == []


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Returns a tracker outside raypp, whose library is not installed."""
    (tmp_path / "my_tracker.py").write_text(
        "from raypp.kinds import TrackerKind\n"
        'KIND = TrackerKind("mine", library="no_such_library", install="my-extra", '
        'variables=("MINE", "MINE_API_KEY"))\n'
        "def open_tracker(run): ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    return "my_tracker:open_tracker"


def test_a_missing_library_is_reported_where_it_would_be_used(own: str) -> None:
    assert check_spec(job(own)) == []
    assert missing_for_trackers(job(own), {}, here=False) == []
    [problem] = missing_for_trackers(job(own), {}, here=True)
    assert "needs the library no_such_library" in problem.fault and "pip install 'my-extra'" in problem.fix
    assert [name for name, _ in own_files(job(own))] == ["my_tracker.py"]


def test_a_folder_that_cannot_be_written_is_reported_where_it_would_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    bad = job({"kind": "tensorboard", "options": {"dir": str(tmp_path / "file" / "below")}})
    problems = missing_for_trackers(bad, {}, here=True)
    assert "cannot write to" in shown(problems)["observe.trackers[0].options.dir"]
    good = job({"kind": "tensorboard", "options": {"dir": str(tmp_path / "new" / "below")}})
    assert "observe.trackers[0].options.dir" not in shown(missing_for_trackers(good, {}, here=True))


def test_variables_travel_only_with_a_job_that_needs_them_and_secrets_apart(own: str) -> None:
    here = {"MINE": "x", "MINE_API_KEY": "s", "WANDB_API_KEY": "t", "MLFLOW_TRACKING_URI": "http://u:p@h"}
    assert tracker_variables(job(), here) == ({}, {})
    assert tracker_variables(job(own), here) == ({"MINE": "x"}, {"MINE_API_KEY": "s"})
    assert tracker_variables(job("mlflow"), here) == ({}, {"MLFLOW_TRACKING_URI": "http://u:p@h"})


def test_every_tracker_has_an_extra_and_is_explained() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    text = explain("observe.trackers")
    for kind in TRACKERS:
        assert kind.install == f"raypp[{kind.name}]" and kind.name in extras
        assert f"options of {kind.name}:" in text and all(f"{name}: " in text for name in kind.settings)
    assert "tensorboard" in str(schema()["$defs"]["TrackerOptions"])


def test_what_is_told_of_the_end_is_checked() -> None:
    def problems(**on_end: str) -> dict[str, str]:
        return shown(check_spec(parse_job({"name": "a", "data": {"kind": "synthetic"}, "observe": {"on_end": on_end}})))

    assert not problems(url="$HOOK") and not problems(command="tell 'a b'")
    assert "names neither a url nor a command" in problems()["observe.on_end"]
    assert "No closing quotation" in problems(command="tell 'a")["observe.on_end.command"]
    with pytest.raises(JobError, match=r"observe\.on_end\.url"):
        problems(url="ftp://here")
