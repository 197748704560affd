"""The screen of `raypp status --watch`, drawn in every size."""

from __future__ import annotations

import io

import pytest

from raypp.api.find_run import Records
from raypp.cli.console import Console
from raypp.cli.screen_view import screen_view
from raypp.observe.status import RankStatus, RunStatus
from raypp.records import Coordinates, Event, RunState

ROWS = [
    {"step": step, "loss": 5 - step / 50, "tokens_per_s": 1e4, "step_s": 0.5, "grad_norm": 0.25}
    for step in range(1, 101)
]


def drawn(
    pp: int, fsdp: int, width: int, height: int, rows: list[dict[str, float]] = ROWS, **status: object
) -> list[str]:
    ranks = tuple(
        RankStatus(number, Coordinates(pp=number % pp, fsdp=number // pp), "n", 7, "dead" if number == 3 else "running")
        for number in range(pp * fsdp)
    )
    known = RunStatus("r", RunState.RUNNING, 100, 200, mesh={"pp": pp, "fsdp": fsdp}, ranks=ranks)
    events = [Event("committed", f"step {step}\x1b[2J\nand more", step=step) for step in range(10)]
    console = Console(file=io.StringIO(), force_terminal=True, width=width, height=height, color_system=None)
    with console.capture() as captured:
        console.print(screen_view(Records({**known.as_dict(), **status}, rows, events), console))
    return captured.get().splitlines()


@pytest.mark.parametrize(("width", "height"), [(100, 40), (80, 24), (40, 12), (20, 5), (5, 2), (1, 1)])
@pytest.mark.parametrize(("pp", "fsdp"), [(1, 1), (2, 2), (64, 32)])
def test_it_fits_any_window(pp: int, fsdp: int, width: int, height: int) -> None:
    lines = drawn(pp, fsdp, width, height)
    assert len(lines) <= height and max(map(len, lines)) <= width
    assert "\x1b[2J" not in "".join(lines)


def test_each_rank_has_its_place_in_the_mesh() -> None:
    lines = drawn(2, 2, 100, 30)
    place = next(number for number, line in enumerate(lines) if line.startswith("mesh  pp 2 · fsdp 2"))
    assert [line.split() for line in lines[place + 1 : place + 4]] == [
        ["pp0", "pp1"], ["fsdp0", "0", "running", "1", "running"], ["fsdp1", "2", "running", "3", "dead"],
    ]  # fmt: skip
    assert "step 100/200" in lines[1] and lines[1].rstrip().endswith("ETA 0:50")


def test_of_many_ranks_those_in_another_state_are_named() -> None:
    shown = "\n".join(drawn(64, 32, 100, 40))
    assert "2047 running, 1 dead" in shown and "3 dead on n" in shown


def test_a_run_that_has_no_step_yet_is_drawn() -> None:
    shown = "\n".join(drawn(1, 1, 80, 24, [], step=0, state="PENDING", ranks=[], mesh={}))
    assert "step 0/200" in shown and "no ranks now" in shown and "no steps yet" in shown


def test_an_error_stays_one_line() -> None:
    assert "first second; fix: third" in drawn(1, 1, 80, 24, error="first\nsecond\n  fix: third")[4]
