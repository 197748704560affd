"""The page and the notebook on using raypp from Python do what they say, on a real cluster."""

import json
import re
from pathlib import Path

import pytest
from laptop import REPOSITORY, Laptop
from programs import run_python

PAGE = REPOSITORY / "docs/tasks/from_python.md"
NOTEBOOK = REPOSITORY / "docs/tasks/first_run.ipynb"


def run_cells(laptop: Laptop, folder: Path, cells: list[str]) -> str:
    """Runs cells one after another, in one process without torch; returns its output."""
    assert laptop.raypp("init", "quickstart", cwd=folder).code == 0
    # The last value of a cell is shown, as in a notebook.
    show = "def _show(it):\n    print(it._repr_html_() if hasattr(it, '_repr_html_') else it)\n"
    program = show + "\n".join(cells) + "\nimport sys\nprint('heavy:', sorted({'torch', 'ray'} & set(sys.modules)))\n"
    done = run_python("-c", program, cwd=folder, env=laptop.environment)
    assert done.stdout.endswith("heavy: []\n")
    return done.stdout


@pytest.mark.slow
def test_the_page_trains_plans_and_sweeps(laptop: Laptop, tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    laptop.names |= {"from-python", "sweep-1e-03", "sweep-3e-03"}
    said = run_cells(laptop, tmp_path, blocks)
    assert [line.split()[0] for line in said.splitlines() if re.match(r"\d+ \d\.", line)] == [
        str(n + 1) for n in range(20)
    ]
    assert "\nSUCCEEDED\n" in said and re.search(r"^best lr: 0\.00[13]$", said, re.M)
    rows = laptop.raypp("history", "from-python").rows()
    assert [f"{row['step']} {row['loss']}" in said for row in rows] == [True] * 20


@pytest.mark.gate
def test_the_notebook_trains_shows_the_run_and_generates(laptop: Laptop, tmp_path: Path) -> None:
    cells = [
        "".join(cell["source"]) for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"
    ]
    shown = cells.index("run.wait()\nrun")
    cells[shown] = "run.wait()\n_show(run)"
    laptop.names.add("notebook")
    said = run_cells(laptop, tmp_path, cells)
    assert "<td>SUCCEEDED</td>" in said and "<polyline" in said
    assert len((tmp_path / "report.html").read_text()) > 10_000
