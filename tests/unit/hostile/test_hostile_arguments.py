"""Whatever a command line names, commands of jobs answer in words, without much work, and for what
was asked."""

from __future__ import annotations

from pathlib import Path

import pytest
from counted_calls import counted_calls

from raypp.cli.main import run

MOST_CALLS = 3_000_000
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
        with counted_calls() as calls:
            code = run([word.replace("NAME", name) for word in COMMANDS[command]])
        assert calls.count < MOST_CALLS, name
        text = "".join(capsys.readouterr())
        assert code in (0, 2, 3), (name, text)
        assert "internal error" not in text and len(text) < 50_000, (name, text[-500:])
        assert not any(ord(letter) < 32 and letter not in "\n\t" for letter in text), (name, text)
    assert {path.name for path in tmp_path.iterdir()} <= {"job.yaml", "home"}


@pytest.mark.parametrize(("fsdp", "options"), [(2000, ("--json",)), (500, ("--per-node", "1", "--link-gbps", "1"))])
def test_a_large_mesh(fsdp: int, options: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A link between each two nodes that any pipeline crosses: thousands of them."""
    file = tmp_path / "job.yaml"
    file.write_text(f"name: a\ndata: {{kind: synthetic}}\nmesh: {{pp: 4, fsdp: {fsdp}}}\n")
    with counted_calls() as calls:
        assert run(["plan", str(file), *options]) == 0
    assert calls.count < MOST_CALLS
    out = capsys.readouterr().out
    assert ("\n" not in out.strip()) == (options == ("--json",))
