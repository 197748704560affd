"""`output.py` and `console.py` show whatever they are given."""

import io
import json

import hostile_world as hostile
import pytest
from rich.box import HEAVY_HEAD
from rich.cells import cell_len
from rich.console import Group
from rich.padding import Padding

from raypp.cli.console import LONGEST_CELL, Console, Lines, Table, Text
from raypp.cli.output import echo, echo_json, echo_lines, show_error, styled
from raypp.errors import JobError, Problem


def drawn(*things: object, width: int = 100, **options: object) -> str:
    screen = Console(file=io.StringIO(), width=width, force_terminal=True, color_system="truecolor")
    screen.print(*things, **options)
    shown = screen.file
    assert isinstance(shown, io.StringIO)
    return shown.getvalue()


@pytest.mark.parametrize("text", hostile.TEXTS.values(), ids=hostile.TEXTS)
def test_whatever_rich_prints_is_shown(text: str) -> None:
    table = Table(title=text, caption=text, box=HEAVY_HEAD, show_edge=True)
    styled_twice = Text(text, "red") + Text(text, "blue")
    table.add_column(text, overflow="fold")
    table.add_column("number")
    for cell in (text, Text(text), Text(text, "red"), Text.assemble("a", (text, "bold"), text), styled_twice):
        table.add_row(cell, text)
    joined = Text("  ").join([Text(text), Text("a") + text])
    for thing in (text, Text(text), table, Group(text, table), Padding(text, (0, 2)), joined):
        shown = drawn(thing)
        assert hostile.faults(shown, coloured=True) == []
        assert hostile.MARK in shown
        assert hostile.faults(drawn(thing, style="bold", soft_wrap=True), coloured=True) == []
    assert hostile.faults(drawn("a", text, Text(text), sep=" ", end="\n"), coloured=True) == []
    assert hostile.faults(drawn(Lines(text, "green")).replace("FORGED", ""), coloured=True) == []


@pytest.mark.parametrize("text", hostile.TEXTS.values(), ids=hostile.TEXTS)
def test_rows_of_a_table_stay_rows_within_the_width(text: str) -> None:
    table = Table(box=None)
    table.add_column("name", overflow="fold")
    table.add_column("size", no_wrap=True)
    for size in range(3):
        table.add_row(text, f"{size} kB")
    lines = [line for line in drawn(table, width=LONGEST_CELL * 2 + 20).splitlines() if line.strip()]
    bare = [hostile._SGR.sub("", line).rstrip() for line in lines]
    assert all(cell_len(line) <= LONGEST_CELL * 2 + 20 for line in bare)
    assert sum(" kB" in line for line in bare) == 3
    ends = {cell_len(line) for line in bare if " kB" in line}
    assert len(ends) == 1


def test_markup_is_text() -> None:
    assert drawn("[bold]x[/bold] [/] :warning:").strip() == "[bold]x[/bold] [/] :warning:"
    assert len(Text("x" * 5)) == 5


@pytest.mark.parametrize("text", hostile.TEXTS.values(), ids=hostile.TEXTS)
def test_lines_and_json_are_shown(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    echo("a ", styled(text, fg="red"), text)
    shown = capsys.readouterr().out
    assert hostile.faults(shown) == []
    assert shown.count("\n") == 1
    echo_lines(f"a {text}", err=True)
    assert "\x1b" not in capsys.readouterr().err
    echo_json({text: [text]})
    shown = capsys.readouterr().out
    assert hostile.faults(shown) == [] and shown.isascii() and shown.count("\n") == 1
    assert json.loads(shown) == {text: [text]}


def test_lines_of_an_error_cannot_pose_as_another_one(capsys: pytest.CaptureFixture[str]) -> None:
    show_error(JobError(Problem("a\nb", "what\nfix: no", "yes\nother: error", "job.yaml:1")))
    assert capsys.readouterr().err.splitlines() == [
        "job.yaml:1 a", "    b: what", "    fix: no", "  fix: yes", "    other: error",
    ]  # fmt: skip
