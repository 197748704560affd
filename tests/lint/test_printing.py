"""Commands print by `output.py` and `console.py` only."""

import ast
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "raypp/cli"
OWN = {"output.py", "console.py"}
FORBIDDEN = {
    "click.echo", "click.secho", "click.style", "click.echo_via_pager", "click.prompt", "click.confirm", "print",
    "sys.stdout.write", "sys.stderr.write", "traceback.print_exc", "traceback.print_exception",
}  # fmt: skip
FORBIDDEN_IMPORTS = {
    "rich.print", "rich.get_console", "rich.console.Console", "rich.text", "rich.text.Text", "rich.table",
    "rich.table.Table", "rich.markup", "rich.pretty", "rich.traceback", "rich.logging", "pprint",
}  # fmt: skip


def other_ways(source: str) -> list[str]:
    """Returns what prints past the two modules in a source."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in FORBIDDEN:
                found.append(name)
            # Without a console these two print to Rich's own.
            if name in ("Live", "Progress", "Status") and "console" not in {one.arg for one in node.keywords}:
                found.append(f"{name} without console=")
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {node.module, *(f"{node.module}.{one.name}" for one in node.names)}
            found += sorted(names & FORBIDDEN_IMPORTS)
        elif isinstance(node, ast.Import):
            found += sorted({one.name for one in node.names} & (FORBIDDEN_IMPORTS | {"rich"}))
    return found


def test_commands_print_by_the_two_modules() -> None:
    paths = [path for path in sorted(FOLDER.glob("*.py")) if path.name not in OWN]
    found = {path.name: other_ways(path.read_text()) for path in paths}
    assert paths and not {name: ways for name, ways in found.items() if ways}


def test_other_ways_are_found() -> None:
    source = (
        "import click, rich\nfrom rich.console import Console\nfrom rich.text import Text\n"
        "click.echo('a')\nprint('b')\nLive('c')\n"
    )
    assert sorted(other_ways(source)) == sorted(
        ["rich", "rich.console.Console", "rich.text", "rich.text.Text", "click.echo", "print", "Live without console="]
    )
