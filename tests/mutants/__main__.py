"""The command: `python -m tests.mutants [--only NAME] [--unit]`."""

import importlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import pytest

from tests.mutants.faults import FAULTS, MEETS, Fault

HERE = Path(__file__).parents[2]
_NOT_COPIED = shutil.ignore_patterns(".git", ".venv*", "build", "__pycache__", ".*_cache", ".hypothesis")
_LIBRARIES = ("hypothesis", "numpy", "pydantic", "torch", "torch.distributed.fsdp", "torch.distributed.pipelining")
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)
_WHY = re.compile(r"^E +(.+)", re.MULTILINE)


@dataclass(frozen=True)
class Found:
    """What became of a fault.

    Attributes:
        fault: Its name.
        killed_by: The first test that failed; "" if none did.
        why: The first line of its error.
        seconds: CPU time of all tests that ran.
    """

    fault: str
    killed_by: str
    why: str
    seconds: float


@click.command()
@click.option("--only", multiple=True, help="Faults whose names begin so; may be given several times.")
@click.option(
    "--survivors", type=click.Path(path_type=Path, exists=True), help="Only those that FILE has as survivors."
)
@click.option("--tests", multiple=True, help="Run these instead of those that meet the module.")
@click.option("--unit", is_flag=True, help="Run unit tests only.")
@click.option("--not-unit", is_flag=True, help="Run the other tests only.")
@click.option("--marks", default="not slow", show_default=True, help="As for pytest -m.")
@click.option("--tree", default=HERE, help="The tree whose code and tests are copied.",
              type=click.Path(path_type=Path, exists=True, file_okay=False))  # fmt: skip
@click.option("--limit", default=900, show_default=True, help="Seconds for the tests of one fault.")
@click.option("--out", default=Path("build/mutants.jsonl"), show_default=True, type=click.Path(path_type=Path))
@click.option("--table", nargs=2, type=click.Path(path_type=Path, exists=True),
              help="Print the table of two files of results, before and after.")  # fmt: skip
def main(
    only: tuple[str, ...], survivors: Path | None, tests: tuple[str, ...], unit: bool, not_unit: bool, marks: str,
    tree: Path, limit: int, out: Path, table: tuple[Path, Path] | None,
) -> None:  # fmt: skip
    """Makes one fault after the other, and appends to OUT which test finds it.

    Exits with 1 if one survived.
    """
    if table is not None:
        _print_table(*table)
        return
    chosen = [fault for fault in FAULTS if fault.name.startswith(only or "")]
    if survivors is not None:
        found = _read(survivors)
        chosen = [fault for fault in chosen if fault.name in found and not found[fault.name].killed_by]
    if not chosen:
        raise click.UsageError("no such fault")
    if gone := stale(tree, chosen):
        what = f"the text of these faults is not there, or more than once: {', '.join(gone)}"
        raise click.ClickException(f"{what}; change `old` in tests/mutants/faults.py to what the code says now")
    out.parent.mkdir(parents=True, exist_ok=True)
    left = []
    with tempfile.TemporaryDirectory(prefix="raypp-mutants-") as folder:
        copy = Path(folder) / "tree"
        shutil.copytree(tree, copy, ignore=_NOT_COPIED, symlinks=True)
        for fault in chosen:
            result = _try(copy, fault, tests, unit, not_unit, marks, limit)
            with out.open("a") as file:
                file.write(json.dumps(asdict(result)) + "\n")
            reported = f"killed by {result.killed_by}" if result.killed_by else "SURVIVED"
            print(f"{fault.name}: {reported}, {result.seconds:.0f} s", flush=True)
            left += [] if result.killed_by else [fault.name]
    print(f"{len(chosen) - len(left)} of {len(chosen)} faults found; survived: {', '.join(left) or 'none'}")
    sys.exit(bool(left))


def stale(tree: Path, faults: Sequence[Fault] = FAULTS) -> list[str]:
    """Returns the faults that cannot be made: their text is not in the code, or more than once."""
    return [fault.name for fault in faults if (tree / fault.file).read_text().count(fault.old) != 1]


def _try(copy: Path, fault: Fault, tests: tuple[str, ...], unit: bool, not_unit: bool, marks: str, limit: int) -> Found:
    path = copy / fault.file
    right = path.read_text()
    path.write_text(right.replace(fault.old, fault.new))
    until, cpu_s = time.monotonic() + limit, _cpu_s()
    groups = [list(tests)] if tests else _meeting(copy, fault.file, unit, not_unit)
    killed_by = why = ""
    try:
        for group in groups:
            killed_by, why = _run(copy, group, marks, max(until - time.monotonic(), 1))
            if killed_by:
                break
        return Found(fault.name, killed_by, why, round(_cpu_s() - cpu_s, 1))
    finally:
        path.write_text(right)


def _cpu_s() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return children.ru_utime + children.ru_stime


def _meeting(copy: Path, file: str, unit: bool, not_unit: bool) -> list[list[str]]:
    """Returns the tests that meet a module, in groups that run one after the other."""
    first, then = next(both for beginning, both in MEETS.items() if file.startswith(beginning))
    name = file.removesuffix(".py").replace("/", ".")
    paths = sorted((copy / "tests/unit").rglob("test_*.py"))
    importing = [str(path.relative_to(copy)) for path in paths if name in path.read_text()]
    groups = [] if not_unit else [first, [one for one in importing if one not in first]]
    groups += [] if unit else [[one] for one in then]
    there = [[one for one in group if (copy / one).exists()] for group in groups]
    return [group for group in there if group]


def _run(copy: Path, tests: list[str], marks: str, limit: float) -> tuple[str, str]:
    """Runs tests until one fails, and returns its name and the first line of its error."""
    arguments = ["-x", "-q", "-p", "no:cacheprovider", "-m", marks, *tests]
    with tempfile.TemporaryFile("w+") as output:
        run = _forked if all(one.startswith("tests/unit") for one in tests) else _started
        pid = run(copy, arguments, output.fileno())
        code = _wait(pid, limit)
        output.seek(0)
        text = output.read()
    if code is None:
        return "", f"the limit of time, in {tests[0]}"  # a slow machine is no kill
    if code in (0, 5):  # 5: no test has these marks
        return "", ""
    failed, why = _FAILED.search(text), _WHY.search(text)
    if failed is None:
        return f"pytest itself, which ended with {code}, in {tests[0]}", text[-300:]
    return failed[1], why[1] if why else ""


def _started(copy: Path, arguments: list[str], output: int) -> int:
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # many runs share the copy's compiled files
    command = [sys.executable, "-m", "pytest", *arguments]
    return subprocess.Popen(
        command, cwd=copy, env=environment, stdout=output, stderr=output, start_new_session=True
    ).pid


def _forked(copy: Path, arguments: list[str], output: int) -> int:
    """Runs unit tests, which start no process, in a fork of this process: libraries are imported
    once for all faults."""
    for library in _LIBRARIES:
        importlib.import_module(library)
    if pid := os.fork():
        return pid
    code = 3
    try:
        os.setsid()
        os.chdir(copy)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ["PYTHONPATH"] = str(copy)
        sys.dont_write_bytecode = False
        sys.path[:] = [str(copy), *(place for place in sys.path if Path(place).absolute() != HERE)]
        for name in [name for name in sys.modules if name.partition(".")[0] in ("raypp", "tests")]:
            del sys.modules[name]
        code = int(pytest.main(arguments))
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _wait(pid: int, limit: float) -> int | None:
    """Returns a process's exit code; after `limit` seconds ends it and its children, then None."""
    until = time.monotonic() + limit
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > until:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return None
        time.sleep(0.1)


def _read(path: Path) -> dict[str, Found]:
    """Returns the results of a file; of several for one fault, a kill, or the last."""
    found: dict[str, Found] = {}
    for line in path.read_text().splitlines():
        one = Found(**json.loads(line))
        if one.killed_by or not (one.fault in found and found[one.fault].killed_by):
            found[one.fault] = one
    return found


def _print_table(before: Path, after: Path) -> None:
    results = [_read(path) for path in (before, after)]
    print("| fault | found before by | CPU s | found now by | CPU s |\n|---|---|---|---|---|")
    for fault in FAULTS:
        cells = []
        for found in results:
            one = found.get(fault.name)
            killed_by = (
                "not run" if one is None else f"`{_short(one.killed_by)}`" if one.killed_by else "**no test that ran**"
            )
            cells.append(f"{killed_by} | {'' if one is None else f'{one.seconds:.0f}'}")
        print(f"| `{fault.name}` | {' | '.join(cells)} |")


def _short(test: str) -> str:
    return re.sub(r"\[.*", "", test.removeprefix("tests/")).replace(".py::", "::")


if __name__ == "__main__":
    main()
