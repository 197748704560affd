"""The command that runs all benchmarks lists them all, with a description of each."""

import os
import re
from pathlib import Path

import pytest
from programs import run_program, run_python

from benchmarks.run import BENCHMARKS, PARTS
from benchmarks.surroundings import too_busy

PLACE = Path(__file__).parents[2]


def test_every_module_that_can_be_run_is_in_the_list_or_a_part_of_one_that_is() -> None:
    runnable = {path.stem for path in (PLACE / "benchmarks").glob("*.py") if '"__main__"' in path.read_text()}
    assert runnable == {one.name for one in BENCHMARKS} | set(PARTS) | {"run"}


def test_the_page_of_figures_names_every_benchmark_in_its_table() -> None:
    page = (PLACE / "docs" / "benchmarks" / "README.md").read_text()
    missing = [one.name for one in BENCHMARKS if f"| `{one.name}` |" not in page]
    assert not missing


@pytest.mark.slow
def test_the_header_is_one_line_with_the_machine_its_load_the_versions_and_the_commit(tmp_path: Path) -> None:
    code = "from benchmarks.surroundings import announce; announce('what else')"
    done = run_python("-c", code, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(PLACE)})
    line, _, rest = done.stdout.partition("\n")
    assert not rest.strip()
    commit = run_program("git", "rev-parse", "--short", "HEAD", code=None, cwd=PLACE).stdout
    wanted = rf"{os.cpu_count()} cores, load average \d+\.\d, \d+ GiB, Python 3\S+, torch \S+, .*, raypp "
    assert re.search(wanted, line), line
    assert line.endswith("what else")
    if commit:
        assert f"raypp commit {commit.strip()}" in line, "of raypp's repository, wherever the benchmark is started"
    assert done.stderr.startswith("warning: load average") or not done.stderr


def test_a_busy_machine_is_noticed() -> None:
    assert not too_busy(load=0.9, busy=0.9, cores=4)
    assert "1.1 of 4 cores busy" in too_busy(load=0.0, busy=1.1, cores=4)
    assert "load average 3.0" in too_busy(load=3.0, busy=0.0, cores=4)
    assert not too_busy(load=3.0, busy=0.0, cores=4, after_another=True), "that was the benchmark before"


@pytest.mark.slow
@pytest.mark.parametrize("name", [one.name for one in BENCHMARKS])
def test_each_says_what_it_does_and_runs_nothing(name: str) -> None:
    shown = run_python("-m", f"benchmarks.{name}", "--help", cwd=PLACE, timeout=120).stdout
    assert "usage:" in shown and f"benchmarks.{name}" in shown
