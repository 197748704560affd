"""The table of docs/families.md has a row of every family, and its command still measures them."""

import subprocess
import sys
from pathlib import Path

import pytest

from raypp.job.known_families import FAMILIES

ROOT = Path(__file__).parents[2]


def test_every_family_has_a_row() -> None:
    rows = [line.split("|") for line in (ROOT / "docs/families.md").read_text().splitlines() if line.startswith("|`")]
    assert [kind for kind in FAMILIES if all(row[1] != f"`{kind}`" for row in rows)] == []
    assert "**" not in str(rows), "an error is larger than it may be"


@pytest.mark.gate
def test_the_command_measures_what_the_page_shows() -> None:
    command = [sys.executable, "-m", "tests.family_errors", "lfm2_moe"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    *_, header, line, row = done.stdout.splitlines()
    assert f"{header}\n{line}\n" in (ROOT / "docs/families.md").read_text()
    assert row.startswith("|`lfm2_moe`|") and row.endswith("|bytes|same|")
