"""The check of a program finds each kind of problem."""

import pytest

from raypp.planning.schedules.action import parse_actions
from raypp.planning.schedules.catalogue import check_program
from raypp.planning.schedules.simulate import StageTimes, simulate

GOOD = ["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"]


def wrong(*rows: str, microbatches: int = 2, placement: list[list[int]] | None = None, trains: bool = True) -> str:
    program = {rank: parse_actions(row) for rank, row in enumerate(rows)}
    return "; ".join(check_program(program, placement or [[0], [1]], microbatches, trains=trains))


def test_nothing_is_wrong_with_a_good_program() -> None:
    assert wrong(*GOOD) == ""
    assert wrong("0F0 0I0 0F1 0W0 0B1", GOOD[1]) == ""


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("0F0 0B0 0B1", "stage 0, microbatch 1: there is no forward"),
        ("0F0 0F1 0B0", "stage 0, microbatch 1: there is no backward"),
        ("0F0 0F0 0F1 0B0 0B1", "0F0 appears twice"),
        ("0F0 0B1 0F1 0B0", "B comes before the forward"),
        ("0F0 0F1 0I0 0B1", "the backward is I; it must be B, or I and W"),
        ("0F0 0F1 0B0 0W0 0B1", "the backward is B and W"),
        ("0F0 0F1 0W0 0I0 0B1", "W comes before I"),
        ("0F1 0F0 0B0 0B1", "the forward of microbatch 0 comes after that of a later microbatch"),
        ("0F0 0F1 0B1 0B0", "the backward of microbatch 0 comes after that of a later microbatch"),
        ("0F0 0F1 0F2 0B0 0B1", "0F2: there are only microbatches 0 to 1"),
        ("0F0 0F1 0B0 0B1 1F0", "rank 0 has 1F0, but stage 1 is on rank 1"),
        ("0F0 0F1 0B0 0B1 7F0", "rank 0 has 7F0, but there is no stage 7"),
    ],
)
def test_each_mistake_is_named(row: str, message: str) -> None:
    assert message in wrong(row, GOOD[1])


def test_ranks_that_wait_for_each_other_are_found() -> None:
    rows = ("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1")
    found = wrong(*rows)
    assert "rank 0 hangs at 0B0: it needs 1B0 first" in found
    assert "rank 1 hangs at 1F1: it needs 0F1 first" in found
    with pytest.raises(ValueError, match="hang at 0B0, 1F1"):
        simulate({rank: parse_actions(row) for rank, row in enumerate(rows)}, StageTimes.equal(2))


def test_a_missing_rank_is_named() -> None:
    assert "the program has ranks [0], the pipeline has 0 to 1" in wrong(GOOD[0])


def test_a_backward_has_no_place_among_forwards_only() -> None:
    assert "B in a forward-only program" in wrong("0F0 0F1 0B0", "1F0 1F1", trains=False)
