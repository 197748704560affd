"""Commands that must answer at once import nothing heavy. Each case is a fresh interpreter."""

from pathlib import Path

import pytest
from programs import run_python

from raypp.job.known_families import FAMILIES
from raypp.records import Event, RunState, StepReport
from raypp.state.run_records.json_lines import LogLine
from raypp.state.run_records.recorder import RunRecorder
from raypp.state.run_records.status import RunStatus
from raypp.storage import open_store

REPOSITORY = Path(__file__).parents[2]
QUICKSTART = "jobs/quickstart.yaml"


def last_line(code: str) -> str:
    return run_python("-c", code, cwd=REPOSITORY).stdout.splitlines()[-1]


def imported_by_command(arguments: list[str], heavy: set[str]) -> str:
    """Returns the exit code of a command and which modules of `heavy` it imported."""
    return last_line(
        "import sys\nfrom raypp.cli.main import run\n"
        f"code = run({arguments!r})\n"
        f"print(code, sorted({heavy!r} & set(sys.modules)))"
    )


QUICK = [["--help"], ["plan", QUICKSTART], ["plan", QUICKSTART, "--set", "mesh.pp=x"], ["explain"], ["schema"]]


@pytest.mark.parametrize(
    "arguments", [QUICK[1], *(pytest.param(words, marks=pytest.mark.slow) for words in (QUICK[0], *QUICK[2:]))]
)
def test_the_quick_commands_import_neither_torch_nor_ray_nor_boto3(arguments: list[str]) -> None:
    assert imported_by_command(arguments, {"torch", "ray", "boto3", "numpy"}) in ("0 []", "2 []")


def test_reading_a_run_imports_neither_torch_nor_ray(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "store"))
    with RunRecorder(store, "kjv", "a1", interval_s=60) as recorder:
        recorder.step(StepReport(1, 2.0, 0.5, 1000, 64, 0.1, 10000.0, 1))
        recorder.event(Event("submitted", "sent to the cluster", 100.0))
        recorder.log(LogLine("from one", 1, "pp1", 1, time=1.0))
        recorder.status(RunStatus("kjv", RunState.RUNNING, 1, 10, 2.0, 10000.0, 1, 0, None, {"pp": 2}, ()))
    assert imported_by_command(["status", f"{store.url}/kjv", "--json"], {"torch", "ray"}) == "0 []"


def test_the_commands_for_checkpoints_import_neither_torch_nor_ray() -> None:
    code = "import sys, raypp.cli.checkpoint_commands; print('torch' in sys.modules, 'ray' in sys.modules)"
    assert last_line(code) == "False False"


def test_the_parts_that_know_only_bytes_import_neither_torch_nor_boto3() -> None:
    parts = "commit ranged_reads retention compatibility run_spec layout"
    names = ", ".join(f"raypp.state.checkpoint.{part}" for part in parts.split())
    names += ", raypp.storage.s3, raypp.control.clusters.seaweed"
    assert last_line(f"import sys, {names}; print('torch' in sys.modules, 'boto3' in sys.modules)") == "False False"


def test_families_are_found_and_declared_without_torch() -> None:
    code = "import sys; from raypp.job.known_families import FAMILIES; print(*FAMILIES, 'torch' in sys.modules)"
    assert last_line(code).split() == [*FAMILIES, "False"]


def test_raypp_from_python_imports_neither_torch_nor_ray() -> None:
    code = (
        "import sys, raypp\n"
        "light = sorted({'torch', 'ray', 'boto3', 'numpy', 'pydantic'} & set(sys.modules))\n"
        f"raypp.plan(raypp.load_job({QUICKSTART!r}))\n"
        "raypp.submit, raypp.run, raypp.list_runs, raypp.Run\n"
        "print(light, sorted({'torch', 'ray', 'rich'} & set(sys.modules)))"
    )
    assert last_line(code) == "[] []"
