"""Every fault of `make mutants` can still be made; otherwise change `old` in its entry."""

from pathlib import Path

from tests.mutants.__main__ import stale
from tests.mutants.faults import FAULTS, MEETS

HERE = Path(__file__).parents[2]


def test_the_text_of_every_fault_is_in_the_code_once() -> None:
    assert stale(HERE) == []


def test_there_are_tests_for_the_file_of_every_fault() -> None:
    assert not {fault.file for fault in FAULTS if not fault.file.startswith(tuple(MEETS))}
    tests = {one for groups in MEETS.values() for group in groups for one in group}
    assert not {one for one in tests if not (HERE / one).exists()}
