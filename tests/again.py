"""`make test-again N=10 LOAD=2`: runs `make test` N times beside LOAD busy processes and reports
every test that was not green in all runs. It reruns nothing silently. With FREEZE=1, a random
process of the tests stands still for 50 ms, again and again.

Each run has a folder, `build/again/run-01/`, with the output and one JUnit file per tier.
"""

import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from xml.etree import ElementTree

import click
import psutil

Outcomes = dict[str, str]
"""What became of every test of a tier: passed, skipped, or failed."""

# Ends with its parent, even if that is killed.
_BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: sum(range(1_000_000))"
_MARK = "TESTS_AGAIN"  # in the environment of all that the tests start
_WORST = ("passed", "skipped", "failed")


@click.command()
@click.option("--runs", default=10, show_default=True, type=click.IntRange(1))
@click.option("--load", default=2, show_default=True, type=click.IntRange(0), help="Busy processes beside the tests.")
@click.option("--freeze", is_flag=True, help="Stop random processes of the tests for 50 ms each.")
@click.option("--out", default=Path("build/again"), show_default=True, type=click.Path(path_type=Path))
@click.argument("tests", nargs=-1)
def main(runs: int, load: int, freeze: bool, out: Path, tests: tuple[str, ...]) -> None:
    """Runs `make test`, or only TESTS, several times, and exits with 1 unless all was green."""
    shutil.rmtree(out, ignore_errors=True)
    found: list[dict[str, Outcomes]] = []
    codes: list[int] = []
    os.environ[_MARK] = "1"
    if freeze:
        threading.Thread(target=_freeze, daemon=True).start()
    with _busy(load):
        for number in range(1, runs + 1):
            folder = out / f"run-{number:02}"
            begun = time.monotonic()
            codes.append(_run(folder.absolute(), tests))
            found.append({path.stem: outcomes_in(path) for path in sorted(folder.glob("*.xml"))})
            counts = Counter(outcome for tier in found[-1].values() for outcome in tier.values())
            reported = (
                ", ".join(f"{counts[outcome]} {outcome}" for outcome in _WORST if counts[outcome]) or "no results"
            )
            took = time.monotonic() - begun
            print(f"run {number} of {runs}: exit {codes[-1]}, {reported}, {took:.0f} s ({folder}/output)", flush=True)
    lines = not_always_green(found)
    green = sum(code == 0 for code in codes)
    print(f"{green} of {runs} runs were green beside {load} busy processes")
    for line in lines:
        print(f"  {line}")
    sys.exit(bool(lines) or green < runs)


@contextmanager
def _busy(count: int) -> Iterator[None]:
    processes = [subprocess.Popen([sys.executable, "-c", _BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _freeze() -> None:
    while True:
        time.sleep(0.02)
        with suppress(psutil.Error):
            one = psutil.Process(random.choice(psutil.pids()))
            if _MARK in one.environ() and one.status() != psutil.STATUS_STOPPED:
                one.suspend()
                time.sleep(0.05)
                one.resume()


def _run(folder: Path, tests: Sequence[str]) -> int:
    """Runs `make test` once, all tiers even if one fails, and returns its exit code."""
    folder.mkdir(parents=True)
    command = ["make", "-k", "test", f"JUNIT={folder}", f"TESTS={' '.join(tests)}"]
    with (folder / "output").open("w") as output:
        return subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False).returncode


def outcomes_in(junit: Path) -> Outcomes:
    """Reads a JUnit file of pytest. A test that passed and whose teardown failed is there twice."""
    outcomes: Outcomes = {}
    for case in ElementTree.parse(junit).iter("testcase"):
        name = f"{case.get('classname', '')}::{case.get('name')}".removeprefix("::")
        tags = {child.tag for child in case}
        outcome = "failed" if tags & {"failure", "error"} else "skipped" if "skipped" in tags else "passed"
        outcomes[name] = max(outcome, outcomes.get(name, "passed"), key=_WORST.index)
    return outcomes


def not_always_green(runs: Sequence[dict[str, Outcomes]]) -> list[str]:
    """Returns a line for every test that did not pass in all runs, or was not skipped in all, and
    for every tier without results in some run."""
    lines = []
    by_test: dict[str, list[str]] = defaultdict(list)
    for tier in sorted({tier for run in runs for tier in run}):
        ran = [run[tier] for run in runs if tier in run]
        if len(ran) < len(runs):
            lines.append(f"{tier}: no results in {len(runs) - len(ran)} of {len(runs)} runs")
        for name in sorted({name for run in ran for name in run}):
            by_test[name] += [run.get(name, "not run") for run in ran]
    for name, outcomes in by_test.items():
        counts = Counter(outcomes)
        if set(counts) not in ({"passed"}, {"skipped"}):
            lines.append(f"{name}: {', '.join(f'{count} {outcome}' for outcome, count in sorted(counts.items()))}")
    return lines


if __name__ == "__main__":
    main()
