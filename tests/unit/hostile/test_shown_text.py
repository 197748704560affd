"""No command prints a control character that it did not make, or obeys markup of others."""

import io
import json
import shlex
from pathlib import Path
from typing import Any

import hostile_world as hostile
import pytest
from rich.cells import cell_len

from raypp.cli import run_commands
from raypp.cli.console import Console
from raypp.cli.main import run
from raypp.control.clusters.known_runs import RunPlace
from raypp.state.run_records.reader import RunReader
from raypp.storage import open_store
from raypp.untrusted.text import shell_word

WIDTH = 100
NOWHERE = "http://127.0.0.1:9"


@pytest.fixture(scope="module", params=hostile.GROUPS, ids=str)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Returns the hostile text and the folder in which it is everywhere."""
    folder = tmp_path_factory.mktemp("world")
    (folder / "w").mkdir()
    hostile.write_world(folder / "w", folder / "home", hostile.GROUPS[request.param])
    return hostile.GROUPS[request.param], folder


@pytest.fixture
def text(world: tuple[str, Path], monkeypatch: pytest.MonkeyPatch) -> str:
    text, folder = world
    monkeypatch.setenv("RAYPP_HOME", str(folder / "home"))
    monkeypatch.setenv("RAYPP_ADDRESS", NOWHERE)
    monkeypatch.chdir(folder / "w")
    return text


@pytest.fixture(params=[False, True], ids=["plain", "coloured"])
def coloured(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    monkeypatch.delenv("NO_COLOR", raising=False)
    if request.param:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("TERM", "xterm-256color")
    else:
        monkeypatch.delenv("FORCE_COLOR", raising=False)
    return bool(request.param)


def test_commands_show_text_of_others(text: str, coloured: bool, capsys: pytest.CaptureFixture[str]) -> None:
    bad, shown = [], set()
    for arguments in hostile.commands(text):
        code = run(arguments)
        reported = capsys.readouterr()
        found = hostile.faults(reported.out, coloured=coloured)
        found += hostile.faults(reported.err, coloured=coloured, live=coloured)  # a bar of progress
        found += [f"exit code {code}"] * (code not in (0, 1, 2, 3, 4))
        bad += [(arguments[:3], found)] if found else []
        if hostile.MARK in reported.out + reported.err:
            shown.add(" ".join(arguments[:2]))
        if not coloured and arguments[0] == "status" and code == 0:
            assert max(map(cell_len, reported.out.splitlines())) <= WIDTH, arguments
    assert bad == []
    refused = {"plan values.yaml"} if "\0" in text else set()  # a job file has no NUL
    assert {"status a", "events a", "logs a", "list", "plan values.yaml"} - refused <= shown


def test_json_commands_print_json(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in hostile.json_commands(text):
        code = run(arguments)
        assert code in (0, 1)
        reported = capsys.readouterr()
        assert hostile.faults(reported.out) == []  # JSON has no colours
        assert hostile.faults(reported.err) == []
        lines = reported.out.splitlines()
        if code and not lines:  # the document is refused
            assert hostile.MARK in reported.err or "COMMIT" in reported.err
            continue
        assert lines and all(json.loads(line) is not None for line in lines), arguments
        assert len(lines) == (2 if arguments[0] == "history" else 1)


def test_tracebacks_show_text_of_others(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "values.yaml", "--debug"]) == 2
    reported = capsys.readouterr().err
    assert "Traceback" in reported and (hostile.MARK in reported or "contains a NUL character" in reported)
    assert hostile.faults(reported.replace("Traceback", "").replace("FORGED", "")) == []


def test_every_line_of_a_log_has_a_short_tag(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    run(["logs", "a"])
    lines = capsys.readouterr().out.splitlines()
    assert lines and all(" | " in line for line in lines)
    assert all(cell_len(line.partition(" | ")[0]) <= 24 for line in lines)


def test_colours_of_a_log_are_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    monkeypatch.setenv("RAYPP_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("RAYPP_ADDRESS", NOWHERE)
    store = open_store(str(tmp_path))
    hostile.write_run(store, "a", "\x1b[1;31mred\x1b[0m\t10%\r20%\x1b[K\r100%")
    run(["logs", f"{tmp_path}/a", "--rank", "0"])
    assert capsys.readouterr().out == "pp0 | red\t10%\npp0 | 20%\\x1b[K\npp0 | 100%\n"


@pytest.mark.parametrize("terminal", [False, True])
def test_the_live_view_shows_text_of_others(text: str, world: tuple[str, Path], terminal: bool) -> None:
    screen = Console(file=io.StringIO(), force_terminal=terminal, width=WIDTH)
    place = RunPlace("s", "a", None)
    reader = RunReader(open_store("s"), "a")
    view = run_commands.LiveView(screen, poll_s=0.01)
    records = view.follow(place, reader)
    screen.print(run_commands.summary_view(records, screen))
    screen.print(view._waiting_text())
    assert isinstance(screen.file, io.StringIO)
    shown = screen.file.getvalue()
    assert hostile.faults(shown, coloured=terminal, live=terminal) == []
    assert hostile.MARK in shown


def jobs(text: str) -> bytes:
    facts = {"raypp_run": text, "raypp_url": "s"}
    return json.dumps([{"submission_id": text, "start_time": 1, "status": text, "metadata": facts}]).encode()


@pytest.mark.parametrize("status", [200, 403, 500])
def test_answers_of_a_cluster_are_shown(
    text: str, status: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    body = text.encode("utf-8", "surrogatepass")
    with hostile.server(body, status, [("/api/jobs/", jobs(text))]) as url:
        monkeypatch.setenv("RAYPP_ADDRESS", url)
        for arguments in (
            ["list"], ["submit", "good.yaml", "--dry-run"], ["doctor"], ["save", "a"], ["stop", "a"], ["status", "a"],
        ):  # fmt: skip
            assert run(arguments) in (0, 1, 2, 3, 4)
            reported = capsys.readouterr()
            assert hostile.faults(reported.out + reported.err) == [], arguments


def s3_error(text: str) -> bytes:
    reported = "".join(f"&#{ord(one)};" if one in "<>&" else one for one in text)
    return f"<?xml version='1.0'?><Error><Code>AccessDenied</Code><Message>{reported}</Message></Error>".encode(
        "utf-8", "surrogatepass"
    )


def test_error_messages_of_s3_are_shown(
    text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "c"}.items():
        monkeypatch.setenv(name, value)
    with hostile.server(s3_error(text), 403) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        assert run(["status", "s3://bucket/a"]) in (1, 2, 3)
    reported = capsys.readouterr()
    assert hostile.faults(reported.out + reported.err) == []


def test_commands_to_paste_are_words(text: str) -> None:
    for status in ("FAILED", "RUNNING", "SUCCEEDED", "STOPPED"):
        facts = {"state": status, "checkpoint": text, "steps": 9}
        again = f"raypp submit {shell_word(text)}"
        for command, _ in run_commands.next_commands(RunPlace("s", text, None), facts, again):
            words = shlex.split(command)
            assert words[0] == "raypp"
            assert sum("zqx" in word for word in words) == 1
            assert words[1:2] != ["owned"] and len(words) <= 8
    assert len(shlex.split(f"--set {shell_word(text)}")) == 2
