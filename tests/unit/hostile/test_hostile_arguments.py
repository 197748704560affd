"""Whatever a command line names, commands of jobs answer in words, soon, and for what was asked."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from raypp.cli.main import run

MOST_S = 5.0
"""Seconds of CPU. What is measured outside tests is below 2."""
NAMES = (
    "x" * 5000, "/" + "x" * 5000, "a/" * 3000, "~nobody-is-called-this/x", "~", "", "..", "/", "a\x1b[2Jb",
    "\x1b]0;t\x07", "a\nb", "é\u202e", "--", "/dev/zero", "/dev/null", "/proc/self/mem", "/dev/fd/99", "[a-z",
    "a\udc80b", "\x7f",
)  # fmt: skip
COMMANDS = {
    "plan": ["plan", "NAME"],
    "dry run": ["submit", "--dry-run", "NAME"],
    "init": ["init", "NAME"],
    "explain": ["explain", "NAME"],
    "explain below": ["explain", "model.NAME"],
    "costs": ["plan", "job.yaml", "--costs", "NAME"],
    "links": ["plan", "job.yaml", "--links", "NAME"],
    "device": ["plan", "job.yaml", "--device", "NAME"],
    "set": ["plan", "job.yaml", "--set", "NAME"],
    "generate": ["generate", "NAME", "--prompt", "a"],
    "prompts": ["generate", "hf", "--prompts", "NAME"],
    "eval": ["eval", "NAME"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_hostile_names(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAYPP_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("RAYPP_ADDRESS", raising=False)
    Path("job.yaml").write_text("name: a\ndata: {kind: synthetic}\n")
    for name in NAMES:
        begun = time.process_time()
        code = run([word.replace("NAME", name) for word in COMMANDS[command]])
        assert time.process_time() - begun < MOST_S, name
        text = "".join(capsys.readouterr())
        assert code in (0, 2, 3), (name, text)
        assert "internal error" not in text and len(text) < 50_000, (name, text[-500:])
        assert not any(ord(letter) < 32 and letter not in "\n\t" for letter in text), (name, text)
    assert {path.name for path in tmp_path.iterdir()} <= {"job.yaml", "home"}


@pytest.mark.parametrize("options", [("--json",), ("--per-node", "1", "--link-gbps", "1")])
def test_the_largest_mesh(options: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A link between each two nodes that any pipeline crosses: thousands of them."""
    file = tmp_path / "job.yaml"
    file.write_text("name: a\ndata: {kind: synthetic}\nmesh: {pp: 4, fsdp: 2000}\n")
    begun = time.process_time()
    assert run(["plan", str(file), *options]) == 0
    assert time.process_time() - begun < MOST_S
    out = capsys.readouterr().out
    assert ("\n" not in out.strip()) == (options == ("--json",))
