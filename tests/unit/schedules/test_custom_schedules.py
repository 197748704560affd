"""A user's own schedule."""

import sys
from pathlib import Path

import pytest

from raypp.errors import JobError
from raypp.planning.schedules.action import printed
from raypp.planning.schedules.catalogue import build_program, schedule_named

OWN = """
def backwards_first(pp, stages_per_rank, microbatches, lookahead=0):
    return {r: [f"{r}F{i}" for i in range(microbatches)] + [f"{r}B{i}" for i in range(microbatches)] for r in range(pp)}

def forgets(pp, stages_per_rank, microbatches, lookahead=0):
    return {r: ["%dF0" % r] for r in range(pp)}

def nonsense(pp, stages_per_rank, microbatches, lookahead=0):
    return {0: ["hello"]}

def folded(pp, stages_per_rank, microbatches, lookahead=0):
    return {0: ["0F0", "3F0", "3B0", "0B0"], 1: ["1F0", "2F0", "2B0", "1B0"]}

def raises(pp, stages_per_rank, microbatches, lookahead=0):
    return {0: {}["nothing"]}

def few(pp):
    return {}

folded.placement = "v"
number = 7
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_schedules.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("own_schedules", None)
    return "own_schedules"


def test_a_function_of_the_users_own_is_a_schedule(own: str) -> None:
    program = build_program(f"{own}:backwards_first", 2, 1, 2)
    assert printed(program[1]) == "1F0 1F1 1B0 1B1"


def test_a_function_may_ask_for_a_v(own: str) -> None:
    assert schedule_named(f"{own}:folded").placement == "v"
    assert printed(build_program(f"{own}:folded", 2, 2, 1)[0]) == "0F0 3F0 3B0 0B0"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("forgets", "stage 0, microbatch 0: there is no backward"),
        ("nonsense", "'hello' is not an action"),
        ("number", "is not a function"),
        ("absent", "has no 'absent'"),
        ("raises", "raises, called with pp 2, .*, raised KeyError: 'nothing' .at .*own_schedules.py:15 in raises: "),
        ("few", "few, .*, raised TypeError: few.. takes 1 positional argument"),
    ],
)
def test_what_is_wrong_with_a_function_is_reported(own: str, name: str, message: str) -> None:
    with pytest.raises(JobError, match=message) as caught:
        build_program(f"{own}:{name}", 2, 1, 2)
    assert {problem.key for problem in caught.value.problems} == {"pipeline.schedule"}


def test_a_table_of_actions_is_a_schedule_and_may_lie_in_a_v(tmp_path: Path) -> None:
    table = tmp_path / "own.csv"
    table.write_text("0F0,0F1,,0B0,0B1\n,1F0,1B0,1F1,1B1\n")
    assert printed(build_program(str(table), 2, 1, 2)[1]) == "1F0 1B0 1F1 1B1"
    with pytest.raises(JobError, match="microbatch 2: there is no forward"):
        build_program(str(table), 2, 1, 3)
    table.write_text("0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0\n")
    assert schedule_named(str(table)).placement == "v"
    build_program(str(table), 2, 2, 1)
    table.write_text("0F0,0B0\n1F0,1Q0\n")
    with pytest.raises(JobError, match=r"own.csv:2: '1Q0' is not an action"):
        schedule_named(str(table))
    with pytest.raises(JobError, match="does not exist"):
        schedule_named(str(tmp_path / "absent.csv"))
