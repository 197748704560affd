"""The command that runs all benchmarks lists them all, with a description of each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.run import BENCHMARKS, PARTS

PLACE = Path(__file__).parents[2]


def test_every_module_that_can_be_run_is_in_the_list_or_a_part_of_one_that_is() -> None:
    runnable = {path.stem for path in (PLACE / "benchmarks").glob("*.py") if '"__main__"' in path.read_text()}
    assert runnable == {one.name for one in BENCHMARKS} | set(PARTS) | {"run"}


def test_the_page_of_figures_names_every_benchmark_in_its_table() -> None:
    page = (PLACE / "docs" / "benchmarks" / "README.md").read_text()
    missing = [one.name for one in BENCHMARKS if f"| `{one.name}` |" not in page]
    assert not missing


@pytest.mark.slow
@pytest.mark.parametrize("name", [one.name for one in BENCHMARKS])
def test_each_says_what_it_does_and_runs_nothing(name: str) -> None:
    command = [sys.executable, "-m", f"benchmarks.{name}", "--help"]
    told = subprocess.run(command, cwd=PLACE, capture_output=True, text=True, timeout=120, check=True).stdout
    assert "usage:" in told and f"benchmarks.{name}" in told
