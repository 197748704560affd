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
