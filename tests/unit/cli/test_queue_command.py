"""`raypp queue`, and what `raypp submit` says while its run waits."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raypp.api.submission import Queued
from raypp.cli import queue_commands, run_commands
from raypp.cli.main import run
from raypp.control.clusters.known_runs import RunPlace
from raypp.errors import EXIT_INTERRUPTED

WAITS = {
    "run": "mine", "url": "/s", "user": "ann", "priority": "low", "needs": "4 × 1 CPU and 1 GPU", "place": 2,
    "since": time.time() - 90, "expected_start": None, "planned_s": None, "after": [],
}  # fmt: skip
HOLDS = {
    "run": "theirs", "url": "/s", "user": None, "cpus": 8.0, "gpus": 8.0, "since": None, "expected_end": None,
}  # fmt: skip

PAUSE = {"node": "", "user": "bob", "since": 0.0, "until": None}


def test_the_line_is_shown_with_users_devices_and_what_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    head = WAITS | {"run": "first", "place": 1, "expected_start": time.time() + 3600}
    later = WAITS | {"run": "later", "place": 3, "after": ["/s/mine"]}
    shown = {"running": [HOLDS], "waiting": [head, WAITS, later], "why": "first needs 4", "damaged": ["x is damaged"]}
    shown["rules"] = [{"node": "10.0.0.7", "user": "bob", "since": 0.0, "until": 90e9}]
    monkeypatch.setattr(queue_commands, "queue", lambda address: shown)
    assert run(["queue"]) == 0
    told = capsys.readouterr()
    lines = [" ".join(line.split()) for line in told.out.splitlines()]
    assert "theirs – – 8 GPU – unknown" in lines and "first needs 4" in lines
    assert any(line.startswith("2. mine ann low 4 × 1 CPU and 1 GPU ") and "ago unknown" in line for line in lines)
    assert any(line.startswith("3. later ann low") and line.endswith("ago after /s/mine") for line in lines)
    assert any(line.startswith("1. first ann low") and "ago in " in line for line in lines)
    assert told.err == "x is damaged\n" and any(line.startswith("10.0.0.7 is held by bob since 19") for line in lines)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["hold", "node"], "--address"),
        (["hold", "node", "--until", "soon"], "'soon' is not a time to come"),
        (["move", "a", "--before", "a"], "a is the run itself"),
        (["move", "a"], "--before"),
    ],
)
def test_what_is_wrong_is_named_before_a_cluster_is_asked(
    words: list[str], told: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAYPP_HOME", str(tmp_path))
    monkeypatch.delenv("RAYPP_ADDRESS", raising=False)
    assert run(["queue", *words]) in (2, 3)
    assert told in capsys.readouterr().err


def test_ctrl_c_leaves_the_run_in_line_and_says_how_to_cancel(capsys: pytest.CaptureFixture[str]) -> None:
    class Interrupted(Queued):
        def follow(self, say: Any, *, detach: bool = False) -> Iterator[dict[str, Any]]:
            yield {"state": "waiting", "before": ["x"], "held": ["theirs has 8 GPU"], "rules": [PAUSE], **WAITS}
            raise KeyboardInterrupt

    queued = Interrupted(None, None, RunPlace("/s", "mine", None))  # type: ignore[arg-type]
    with pytest.raises(SystemExit) as left:
        run_commands.wait_in_line(queued, "4 ranks need 4 GPUs; 0 are free", False, False)
    told = capsys.readouterr()
    assert left.value.code == EXIT_INTERRUPTED
    assert "mine: place 2 in the line, after x (theirs has 8 GPU); the line is paused by bob since " in told.out
    assert "stays in the line" in told.err and "raypp queue cancel mine" in told.err
