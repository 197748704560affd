"""Commands as processes, on a pseudo-terminal and in a pipe: text of others controls neither."""

import os
import pty
import subprocess
import sys
from pathlib import Path

import hostile_world as hostile
import pytest

pytestmark = pytest.mark.slow

COMMANDS = [
    ["logs", "a"],
    ["status", "a"],
    ["status", "a", "--watch"],
    ["checkpoints", "diff", "s/a/step-3", "s/b/step-3"],
    ["checkpoints", "show", "s/a/step-3"],
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    (folder / "w").mkdir()
    hostile.write_world(folder / "w", folder / "home", hostile.GROUPS["controls"] + hostile.GROUPS["markup"])
    return folder


def environment(folder: Path, **more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")}
    return {**kept, "RAYPP_HOME": str(folder / "home"), "RAYPP_ADDRESS": "http://127.0.0.1:9", **more}


def on_a_terminal(command: list[str], folder: Path) -> str:
    ours, its = pty.openpty()
    process = subprocess.Popen(
        command, cwd=folder / "w", stdin=its, stdout=its, stderr=its,
        env=environment(folder, TERM="xterm-256color", COLORTERM="truecolor"),
    )  # fmt: skip
    os.close(its)
    seen = b""
    with os.fdopen(ours, "rb", buffering=0) as screen:
        try:
            while data := screen.read(65536):
                seen += data
        except OSError:
            pass  # the process has closed the terminal
    assert process.wait(60) in (0, 1)
    return seen.decode()


@pytest.mark.parametrize("arguments", COMMANDS, ids=lambda arguments: " ".join(arguments[:2]))
def test_a_terminal_gets_only_what_raypp_makes(arguments: list[str], folder: Path) -> None:
    shown = on_a_terminal(_raypp(arguments), folder)
    assert hostile.faults(shown, coloured=True, live=True) == []
    assert hostile.MARK in shown
    assert "\x1b[" in shown or arguments[:2] == ["checkpoints", "diff"]


def test_a_pipe_gets_no_control_character(folder: Path) -> None:
    for arguments in COMMANDS:
        done = subprocess.run(_raypp(arguments), cwd=folder / "w", capture_output=True, env=environment(folder))
        assert hostile.faults((done.stdout + done.stderr).decode()) == [], arguments


def test_a_terminal_without_these_characters_gets_their_numbers(folder: Path) -> None:
    environ = environment(folder, PYTHONIOENCODING="ascii")
    done = subprocess.run(_raypp(["status", "a"]), cwd=folder / "w", capture_output=True, env=environ)
    assert done.returncode == 0
    assert done.stdout.isascii()
    assert hostile.MARK in done.stdout.decode()


def _raypp(arguments: list[str]) -> list[str]:
    return [sys.executable, "-c", "from raypp.cli.main import main; main()", *arguments]
