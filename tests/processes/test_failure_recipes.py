"""Follows CONTRIBUTING's recipes for failure policies and kinds exactly, in a copy of raypp."""

import os
import re
import shutil
from pathlib import Path

import pytest
from programs import run_python

from raypp.cli.main import run

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[2]
CONTRACT = "tests/unit/recovery/test_policies.py"


def code_of(recipe: str) -> str:
    page = (REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8")
    found = re.search(r"```python\n(.*?)```", page.partition(f"**{recipe}.**")[2], re.DOTALL)
    assert found is not None, f"CONTRIBUTING has no recipe {recipe!r} with code"
    return found[1]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Creates what a contributor has: raypp, a job, the contract tests, and the page they read."""
    shutil.copytree(REPOSITORY / "raypp", tmp_path / "raypp", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(REPOSITORY / "jobs", tmp_path / "jobs")
    for name in (CONTRACT, "docs/reliability.md"):
        (tmp_path / name).parent.mkdir(parents=True)
        shutil.copy(REPOSITORY / name, tmp_path / name)
    return tmp_path


def in_the_copy(place: Path, code: str) -> str:
    code = f"import pytest\ncontract = ['-p', 'no:cacheprovider', '-q', '-rA', '{CONTRACT}', '-k']\n{code}"
    environment = {**os.environ, "PYTHONPATH": str(place), "PYTHONDONTWRITEBYTECODE": "1"}
    return run_python("-c", code, cwd=place, env=environment, timeout=240).stdout


LED_BY_PATIENT = """
from raypp.cli.main import run
from raypp.control import machine as m
from raypp.failure_kinds import FailureKind
from raypp.records import RankFailure
from raypp.control.recovery.policy import policy_of
from raypp.job.job import RecoverySection

assert run(["list-kinds", "recovery.policy", "--json"]) == 0
assert run(["plan", "jobs/quickstart.yaml", "--set", "recovery.policy=patient", "--json"]) == 0
machine = m.Machine(policy=policy_of(RecoverySection(policy="patient")))
failed = m.RankFailed(RankFailure(0, "pp0", "a", 1, FailureKind.KILLED, "gone"))
for event in (m.Start(), m.Claimed(1), m.Seated(), failed, m.AttemptEnded()):
    machine, commands = m.step(machine, event)
assert commands == (m.Delay(60.0),), commands
assert pytest.main([*contract, "patient"]) == 0
"""


def test_a_policy_is_one_file_that_the_job_file_and_the_contract_tests_find(copy: Path) -> None:
    (copy / "raypp" / "control" / "recovery" / "policies" / "patient.py").write_text(code_of("A failure policy"))
    reported = in_the_copy(copy, LED_BY_PATIENT)
    assert '"name": "patient"' in reported and '"summary": "wait a minute before each restart"' in reported
    tests = (copy / CONTRACT).read_text().count("\n@policies\n")
    passed = {line.partition("[")[0] for line in reported.splitlines() if line.startswith("PASSED")}
    assert tests and len(passed) == tests


def test_a_policy_outside_raypp_is_named_by_its_module_and_one_that_is_no_policy_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = "policies_of_ours"
    more = "\n\ndef broken(recovery):\n    return 7\n\n\ndef failing(recovery):\n    return recovery.patience\n"
    (tmp_path / f"{own}.py").write_text(code_of("A failure policy") + more)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(REPOSITORY)
    plan = ["plan", "jobs/quickstart.yaml", "--set"]
    assert run([*plan, f"recovery.policy={own}:build"]) == 0
    for name, words in (
        ("paitent", "there is no 'paitent'; there are: default"),
        ("no_such_module:build", "cannot import 'no_such_module'"),
        (f"{own}:missing", f"module '{own}' has no 'missing'"),
        (f"{own}:broken", f"{own}:broken returned int, which is not a policy"),
        (f"{own}:failing", f"{own}:failing raised AttributeError"),
    ):
        capsys.readouterr()
        assert run([*plan, f"recovery.policy={name}"]) == 2
        reported = capsys.readouterr().err
        assert f"--set recovery.policy={name}: {words}" in reported and reported.count("recovery.policy=") == 1


RAISED_IN_A_RANK = """
from pathlib import Path
from raypp.control.worker import kind_and_cause
from raypp.errors import RayppError
from raypp.failure_kinds import FailureKind

class TooHotError(RayppError):
    failure_kind = FailureKind.OVERHEATED

kind, cause = kind_and_cause(TooHotError("101 degrees"))
assert (kind, cause, kind.traits.ends_process) == ("overheated", "101 degrees", True)
assert pytest.main([*contract, "page"]) == 1
page, row = Path("docs/reliability.md"), "| `overheated` | the driver says so | restart | degrees |\\n"
page.write_text(page.read_text().replace("| `unknown` |", row + "| `unknown` |"))
assert pytest.main([*contract, "page or overheated"]) == 0
"""


def test_a_kind_of_failure_is_one_line_that_the_contract_tests_find(copy: Path) -> None:
    kinds = copy / "raypp" / "failure_kinds.py"
    text = kinds.read_text()
    line = next(line for line in text.splitlines() if line.startswith("    UNKNOWN = "))
    kinds.write_text(text.replace(line, code_of("A failure kind") + line))
    reported = in_the_copy(copy, RAISED_IN_A_RANK)
    passed = {
        line.partition("[")[0] for line in reported.splitlines() if line.startswith("PASSED") and "overheated" in line
    }
    assert len(passed) == 4
