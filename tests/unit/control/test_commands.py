"""Commands to a controller that is being restarted. No cluster: only what Ray raises is real."""

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import hostile_world as hostile
import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError

from raypp.control import client
from raypp.control.client import no_such_controller
from raypp.control.clusters.dashboard import Dashboard
from raypp.control.clusters.find import Cluster
from raypp.control.clusters.known_runs import RunPlace
from raypp.control.controller import Controller
from raypp.control.driver import _record_end, _recorded_end, answer_of, why_no_controller, why_not_after
from raypp.control.leader import Leader
from raypp.control.machine import RunPhase
from raypp.control.on_end import tell_end
from raypp.control.protocol import RunRequest
from raypp.job.load import job_document, parse_job
from raypp.records import RunState, StepReport
from raypp.state.checkpoint.run_spec import RunEnd, read_end, write_end, write_spec
from raypp.storage.directory import DirectoryStore


def _ask(failures: list[Exception]) -> Callable[[], dict[str, Any]]:
    def ask() -> dict[str, Any]:
        if failures:
            raise failures.pop(0)
        return {"state": "STOPPED"}

    return ask


def _away() -> Exception:
    return ActorUnavailableError("the connection broke", None)


def test_a_controller_that_restarts_is_asked_again() -> None:
    assert answer_of(_ask([_away(), _away()]), 60.0) == {"found": True, "state": "STOPPED"}


def test_a_controller_that_has_ended_is_not_found() -> None:
    assert answer_of(_ask([_away(), ActorDiedError()]), 60.0) == {"found": False}


def test_a_controller_that_does_not_come_back_is_not_taken_for_one_that_has_ended() -> None:
    with pytest.raises(ActorUnavailableError):
        answer_of(_ask([_away()] * 1000), 0.5)


def _controller(folder: Path, *, restarted: bool) -> tuple[Controller, Leader]:
    job = parse_job({"name": "r", "checkpoint": {"url": str(folder)}})
    controller = Controller.__new__(Controller)
    controller._leader = Leader(RunRequest("r", job_document(job)), None, restarted)
    return controller, controller._leader


def test_a_save_waits_until_the_restarted_controller_has_taken_its_ranks_over(tmp_path: Path) -> None:
    controller, leader = _controller(tmp_path, restarted=True)

    def take_over() -> None:
        leader.machine = replace(leader.machine, phase=RunPhase.RUNNING, committed_step=7)
        leader.begun.set()

    threading.Timer(0.3, take_over).start()
    assert controller.save(60.0)["committed"] == 7
    leader.record.close()


def test_a_save_that_takes_long_is_waited_for_and_not_requested_again(tmp_path: Path) -> None:
    controller, leader = _controller(tmp_path, restarted=False)
    leader.begun.set()
    leader.machine = replace(leader.machine, phase=RunPhase.RUNNING, attempt=2)
    assert controller.save(0.0)["pending"] == (1, 2)
    assert leader.reports.save_wanted
    leader.reports.save_wanted = False
    leader.record.add_step(StepReport(40, 1.0, 1.0, 10, 10, 0.1, 100.0, 2))
    assert controller.save(0.0, (1, 2))["pending"] == (1, 2)
    assert not leader.reports.save_wanted
    training = leader.machine
    leader.machine = replace(training, committed_step=3)
    assert controller.save(0.0, (1, 2))["committed"] == 3
    for over in (replace(training, attempt=3), replace(training, phase=RunPhase.ENDING)):
        leader.machine = over
        answer = controller.save(60.0, (1, 2))
        assert answer["committed"] is None and "pending" not in answer
    leader.record.close()


class _Asked:
    """Stands in for `client.command_run`; gives these answers."""

    def __init__(self, *answers: dict[str, Any]) -> None:
        self.commands: list[tuple[object, ...]] = []
        self._answers = list(answers)

    def __call__(self, cluster: Cluster, place: RunPlace, *command: object) -> dict[str, Any]:
        self.commands.append(command)
        return self._answers[len(self.commands) - 1]


_CLUSTER = Cluster("http://127.0.0.1:1", Dashboard("http://127.0.0.1:1"))
_PLACE = RunPlace("/nowhere", "r", None)


def test_a_save_and_a_stop_are_waited_for_until_they_are_done(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    waits: list[str] = []
    pending = {"found": True, "committed": None, "what": "", "pending": [7, 2]}
    asked = _Asked(pending, pending, {"found": True, "committed": 7, "what": "url"})
    monkeypatch.setattr(client, "command_run", asked)
    assert client.save_run(_CLUSTER, _PLACE, lambda: waits.append("save"))["committed"] == 7
    assert asked.commands == [("save",), ("save", [7, 2]), ("save", [7, 2])]

    going_on = {"found": True, "state": None}
    asked = _Asked(going_on, going_on, {"found": False})
    monkeypatch.setattr(client, "command_run", asked)
    store = DirectoryStore(tmp_path)
    write_spec(store, "r", {})
    write_end(store, RunEnd("r", RunState.STOPPED, 0, 8), 1)
    answer = client.stop_run(_CLUSTER, _PLACE, store, save=True, on_wait=lambda: waits.append("stop"))
    assert (answer["found"], answer["state"], answer["step"]) == (True, "STOPPED", 8)
    assert asked.commands == [("stop", True)] * 3
    assert waits == ["save", "stop"]


def test_a_driver_whose_controller_did_not_wait_for_it_reads_how_the_run_ended(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    request = RunRequest("r", {"checkpoint": {"url": str(tmp_path)}}, "new", number=2)
    write_end(store, RunEnd("r", RunState.FAILED, 1), 1)
    assert _recorded_end(request) is None
    end = write_end(store, RunEnd("r", RunState.SUCCEEDED, 0, 60), 2)
    assert _recorded_end(request) == end


def test_a_run_starts_after_others_only_if_these_have_succeeded(tmp_path: Path) -> None:
    store, runs = DirectoryStore(tmp_path), {name: f"{tmp_path}/{name}" for name in ("a", "b", "c")}
    for name, end in {"a": RunEnd("a", RunState.SUCCEEDED, 0, 9), "b": RunEnd("b", RunState.STOPPED, 0, 4)}.items():
        write_spec(store, name, {})
        write_end(store, end, 1)
    write_spec(store, "c", {})
    assert why_not_after([]) == why_not_after([runs["a"]]) == ""
    assert why_not_after([runs["a"], runs["b"]]).startswith("b had to succeed before, and is STOPPED after step 4; `")
    assert why_not_after([runs["c"]]).startswith("c had to succeed before, and has no recorded end; `raypp submit")
    write_end(store, RunEnd("c", RunState.FAILED, 1, 2, reason="no memory"), 1)
    assert "c had to succeed before, and is FAILED after step 2 (no memory)" in why_not_after([runs["c"]])


def test_a_run_that_nobody_could_lead_has_an_end(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    write_spec(store, "r", {})
    end = RunEnd("r", RunState.FAILED, 2, reason="no torch")
    _record_end(RunRequest("r", {"checkpoint": {"url": str(tmp_path)}}), end)
    read = read_end(store, "r")
    assert read is not None and replace(read, time=end.time) == end


def test_the_end_of_a_run_is_posted_and_failures_are_told() -> None:
    got: list[dict[str, Any]] = []
    failures: list[list[str]] = []

    def respond(_: str, path: str, body: bytes) -> tuple[int, bytes]:
        got.append(json.loads(body))
        return 200 if path == "/key" else 403, b""

    with hostile.answering(respond) as here:
        for url, command in (("$HOOK/key", None), (f"{here}/other", "tell 'us"), ("http://127.0.0.1:1/", None)):
            on_end = {"observe": {"on_end": {"url": url, "command": command}}}
            resources = {"resources": {"cpus_per_rank": 1, "env": {"HOOK": here}}}
            end = RunEnd("r", RunState.STOPPED, 0, 7, "s3://b/my runs/r/step-00000005")
            failures.append(tell_end({"checkpoint": {"url": "s3://b/my runs"}} | on_end | resources, end))
    assert got[0] == {
        "run": "r", "state": "STOPPED", "step": 7, "reason": "", "exit_code": 0,
        "checkpoint": "s3://b/my runs/r/step-00000005", "report": "raypp report 's3://b/my runs/r'",
    }  # fmt: skip
    assert not failures[0]
    assert failures[1] == [
        "observe.on_end.url failed: HTTP Error 403: Forbidden",
        "observe.on_end.command failed: No closing quotation",
    ]
    assert "refused" in failures[2][0]


@pytest.mark.parametrize(("state", "again"), [("PENDING according to its records", True), ("FAILED", False)])
def test_a_run_without_a_controller_may_only_just_have_been_submitted(state: str, again: bool) -> None:
    fix = no_such_controller("r", state).problems[0].fix
    assert ("try again" in fix) == again and "--resume --set name=r" in fix


_HEAD = (
    "The actor died because of an error raised in its creation task, "
    "\x1b[36mray::raypp/a:Controller.__init__()\x1b[39m (pid=7, ip=10.0.0.1, actor_id=ab, repr=raypp/a)\n"
    '  File "/somewhere/raypp/control/controller.py", line 44, in __init__\n'
    "    self._leader = Leader(request)\n"
    "                   ^^^^^^^^^^^^^^^\n"
)


@pytest.mark.parametrize(
    ("error", "words", "code"),
    [
        (
            "raypp.errors.JobError: checkpoint.url: is empty\n  fix: use s3://",
            "checkpoint.url: is empty\n  fix: use s3://",
            2,
        ),
        ("raypp.storage.store.StoreError: no answer", "no answer", 3),
        ("raypp.errors.Problem: not an error", "raypp.errors.Problem: not an error", 1),
        ("raypp.not_there.JobError: x", "raypp.not_there.JobError: x", 1),
        ("ModuleNotFoundError: No module named 'boto3'", "ModuleNotFoundError: No module named 'boto3'", 1),
    ],
)
def test_an_error_of_the_constructor_is_shown_in_its_own_words(error: str, words: str, code: int) -> None:
    assert why_no_controller(f"{_HEAD}{error}\n") == (words, code)


def test_of_an_end_without_a_traceback_the_last_line_is_shown() -> None:
    text = "The actor died unexpectedly before finishing this task.\n\tclass_name: Controller\nThe node has died."
    assert why_no_controller(text) == ("The node has died.", 1)
    assert why_no_controller("") == ("", 1)
