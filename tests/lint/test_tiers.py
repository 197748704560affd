"""`make test` and `make lint` run every folder of tests, each in one tier."""

import re
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_every_folder_of_tests_belongs_to_one_tier_that_make_runs() -> None:
    makefile = (TESTS.parent / "Makefile").read_text()
    tiers = dict(re.findall(r"^([A-Z0-9]+) := (tests/.+)$", makefile, re.MULTILINE))
    folders = [Path(folder).name for tier in tiers.values() for folder in tier.split()]
    with_tests = {path.relative_to(TESTS).parts[0] for path in TESTS.rglob("test_*.py")}
    assert sorted(folders) == sorted(with_tests)
    (rule,) = re.findall(r"^test: (test-.+(?:\n\t.+)+)$", makefile, re.MULTILINE)
    first, *recipe = rule.split("\n")
    (lint,) = re.findall(r"^lint: venv\n((?:\t.+\n)+)", makefile, re.MULTILINE)
    assert "pytest -q $(LINT)\n" in lint
    del tiers["LINT"]
    for target in [*first.split(), *recipe[-1].partition("SIDE_BY_SIDE=1")[2].split()]:
        (command,) = re.findall(rf"^{target}: venv\n\t(.+)$", makefile, re.MULTILINE)
        for tier in re.findall(r"\$\(([A-Z0-9]+)\)", command):
            tiers.pop(tier, None)
    assert not tiers, "in no target of `make test`"


def test_no_two_files_of_tests_have_one_name() -> None:
    """pytest imports a file of tests by its name alone; `make test-slow` collects all folders."""
    names = Counter(path.name for path in TESTS.rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def test_ci_runs_the_slow_tests_of_every_tier_that_are_marked_gate() -> None:
    """It runs those of the fault table, too. Of tests/hosts, which needs hours, those of Slurm."""
    words = [line.split() for line in (TESTS.parent / ".ci/run").read_text().splitlines()]
    assert ["part", "make", "test"] in words
    with_gate = [line for line in words if "GATE=1" in line]
    assert {word for line in with_gate for word in line if word.startswith("test-")} == {
        "test-ranks", "test-s3", "test-ray", "test-e2e", "test-faults"
    }  # fmt: skip
    assert 'RANKS="tests/unit tests/processes tests/ranks tests/gpu"' in (TESTS.parent / ".ci/run").read_text()
    assert 'FAULTS="tests/chaos tests/hosts/test_slurm.py"' in (TESTS.parent / ".ci/run").read_text()
