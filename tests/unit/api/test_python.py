"""raypp from Python: `load_job`, `Job`, `plan`, `Run`, over records in a directory."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

import raypp
from raypp.cli.main import run as command
from raypp.errors import JobError, RunFailedError
from raypp.records import Event, RunState, StepReport
from raypp.state.run_records.json_lines import LogLine
from raypp.state.run_records.recorder import RunRecorder
from raypp.state.run_records.status import RunStatus
from raypp.storage import open_store

QUICKSTART = str(Path(__file__).parents[3] / "jobs/quickstart.yaml")
MODEL = {"kind": "llama", "num_layers": 4, "hidden_size": 64, "num_heads": 4, "ffn_size": 128, "vocab_size": 300}


def recorded(folder: Path, state: RunState, error: str | None = None) -> raypp.Run:
    """Returns a run of three steps, the second of which came twice, with an event and log lines."""
    store = open_store(str(folder / "store"))
    with RunRecorder(store, "kjv", "a1", interval_s=60) as recorder:
        for step, attempt in ((1, 1), (2, 1), (2, 2), (3, 2)):
            recorder.step(StepReport(step, 3.0 - step / 10, 0.5, 1000, 64, 0.1, 10000.0, attempt))
        recorder.event(Event("rank_failed", "killed <by> hand", 100.0, step=2, rank=1, details={"cause": "killed"}))
        recorder.log(LogLine("from one", 1, "pp1", 1, time=1.0))
        recorder.log(LogLine("from the controller", time=2.0))
        recorder.status(RunStatus("kjv", state, 3, 3, 2.7, 10000.0, 2, 1, None, {"pp": 2}, (), error))
    return raypp.run(f"{store.url}/kjv")


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert command(words) == 0
    return capsys.readouterr().out


def test_a_job_of_a_file_and_one_made_in_python_have_the_same_plan() -> None:
    loaded = raypp.load_job(QUICKSTART, {"train.steps": 7, "mesh": {"pp": 2}})
    assert (loaded.train.steps, loaded.mesh.pp, loaded.mesh.fsdp) == (7, 2, 1)
    made = raypp.Job(**loaded.model_dump())
    assert raypp.plan(made).as_dict() == raypp.plan(loaded).as_dict()


def test_a_plan_says_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    plan = raypp.plan(raypp.load_job(QUICKSTART), device="rtx4090", link_gbps=1)
    there = json.loads(printed(capsys, "plan", QUICKSTART, "--device", "rtx4090", "--link-gbps", "1", "--json"))
    assert json.loads(json.dumps(plan.as_dict())) == there
    assert plan.step_s == there["predictions"][0]["step_s"] and plan.fits is True
    large = raypp.load_job(QUICKSTART, {"model.hidden_size": 8192, "model.ffn_size": 65536})
    assert raypp.plan(large, device="rtx4090").fits is False


def test_all_problems_of_a_job_made_in_python_come_as_one_error_with_its_keys() -> None:
    job = raypp.Job(name="x", model=MODEL, data={"kind": "text"}, mesh={"pp": 9})
    with pytest.raises(JobError) as error:
        raypp.plan(job)
    assert {problem.key for problem in error.value.problems} >= {"data.path", "mesh.pp"}


def test_a_run_answers_as_its_commands_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = recorded(tmp_path, RunState.SUCCEEDED)
    name = f"{run.place.url}/{run.name}"
    assert run.status() == json.loads(printed(capsys, "status", name, "--json"))
    assert run.history() == [json.loads(line) for line in printed(capsys, "history", name).splitlines()]
    assert run.events() == json.loads(printed(capsys, "events", name, "--json"))
    assert run.logs() == ["pp1 | from one", "controller | from the controller"]
    assert run.logs(rank=1) == ["pp1 | from one"]
    assert run.wait()["state"] == "SUCCEEDED"
    assert [row["step"] for row in run.follow()] == [row["step"] for row in run.history()] == [1, 2, 3]


def test_a_run_that_failed_raises_its_cause(tmp_path: Path) -> None:
    run = recorded(tmp_path, RunState.FAILED, "rank 1 was killed")
    with pytest.raises(RunFailedError, match="rank 1 was killed"):
        run.wait()


def test_commands_to_a_run_that_has_ended_say_how_it_goes_on(tmp_path: Path) -> None:
    run = recorded(tmp_path, RunState.STOPPED)
    with pytest.raises(JobError, match="--resume"):
        run.save()
    assert run.stop() == {key: run.status()[key] for key in ("state", "step", "checkpoint")}


def test_a_notebook_shows_state_mesh_and_curve_of_a_run_as_one_piece_of_html(tmp_path: Path) -> None:
    run = recorded(tmp_path, RunState.FAILED, "rank <1> was killed")
    shown = ElementTree.fromstring(f"<div>{run._repr_html_()}</div>")
    cells = dict(zip([one.text for one in shown.iter("th")], [one.text for one in shown.iter("td")], strict=True))
    assert cells["state"] == "FAILED" and cells["mesh"] == "pp 2" and cells["error"] == "rank <1> was killed"
    (line,) = shown.iter("polyline")
    assert len(str(line.get("points")).split()) == 3


def test_a_report_is_written_where_it_was_asked_for(tmp_path: Path) -> None:
    page = recorded(tmp_path, RunState.SUCCEEDED).report(tmp_path / "page.html")
    assert page.read_text().startswith("<!doctype html>") and "kjv" in page.read_text()


def test_raypp_has_no_other_names() -> None:
    assert set(raypp.__all__) <= set(dir(raypp))
    with pytest.raises(AttributeError, match="has no attribute 'train_everything'"):
        _ = raypp.train_everything
