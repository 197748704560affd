"""What `raypp stop` and `raypp submit` say of a run that was stopped, and their exit codes."""

from pathlib import Path
from typing import Any

import pytest

from raypp.api import run_control as api_run
from raypp.api.run_control import RunControl
from raypp.api.submission import JobWatch
from raypp.cli.main import run
from raypp.control.clusters.dashboard import Dashboard
from raypp.control.clusters.find import Cluster
from raypp.control.clusters.known_runs import RunPlace
from raypp.records import RunState
from raypp.state.checkpoint.run_spec import RunEnd
from raypp.state.run_records.reader import RunReader
from raypp.storage.directory import DirectoryStore

NOBODY = "http://127.0.0.1:1"
PLACE = RunPlace("", "mine", NOBODY)
LACKS = "stopped without its last checkpoint (the newest is of step 5): rank 0: the disk is full"


@pytest.mark.parametrize(("state", "code"), [(RunState.STOPPED, 0), (RunState.STOPPED, 1), (RunState.FAILED, 4)])
def test_submit_exits_with_the_code_of_the_run_s_end(state: RunState, code: int) -> None:
    watch = JobWatch(Cluster(NOBODY, Dashboard(NOBODY)), PLACE)
    watch._ended = 0.0
    assert watch.exit_code(RunEnd("mine", state, code), print) == code


def test_stop_is_an_error_when_the_last_checkpoint_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer: dict[str, Any] = {"found": True, "state": "STOPPED", "step": 8, "checkpoint": "s3://b/mine/step-00000008"}
    cluster = Cluster(NOBODY, Dashboard(NOBODY))
    monkeypatch.setattr(api_run.client, "command_run", lambda *_: answer)
    monkeypatch.setattr(api_run.known_runs, "cluster_of", lambda *_: cluster)
    mine = RunControl(PLACE, RunReader(DirectoryStore(tmp_path), "mine"))
    monkeypatch.setattr(RunControl, "find", lambda _: mine)
    answer |= {"exit_code": 0, "reason": ""}
    assert run(["stop", "mine"]) == 0
    assert capsys.readouterr().out == "mine: STOPPED at step 8; newest checkpoint: s3://b/mine/step-00000008\n"
    answer |= {"state": "FAILED", "checkpoint": None, "exit_code": 1, "reason": LACKS}
    assert run(["stop", "mine"]) == 1
    printed = capsys.readouterr().err
    assert "FAILED at step 8; newest checkpoint: none: stopped without its last" in printed
    assert "raypp events mine" in printed
