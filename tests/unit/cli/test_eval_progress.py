"""How far an evaluation is, where there is no terminal."""

from __future__ import annotations

import pytest

from raypp.cli.eval_command import _Lines, evaluation_progress


def test_lines_come_seldom_and_tell_the_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    now = [100.0]
    lines = _Lines(lambda: now[0])
    for second, done in ((1, 1_000), (4, 4_000), (11, 11_000), (20, 20_000), (50, 41_000)):
        now[0] = 100.0 + second
        lines.update({"done": done, "total": 71_000, "unit": "tokens"})
    printed = capsys.readouterr()
    assert printed.err.splitlines() == [
        "evaluating: 11,000 of 71,000 tokens, 1:00 left",
        "evaluating: 41,000 of 71,000 tokens, 0:37 left",  # 40,000 tokens took 49 s
    ]
    assert not printed.out


def test_another_request_begins_anew(capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    lines = _Lines(lambda: now[0])
    for second, done in ((1, 50), (10, 90), (50, 10), (90, 20)):
        now[0] = float(second)
        lines.update({"done": done, "total": 100, "unit": "rows"})
    assert capsys.readouterr().err.splitlines() == [
        "evaluating: 90 of 100 rows, 0:02 left",
        "evaluating: 10 of 100 rows",
        "evaluating: 20 of 100 rows, 5:20 left",
    ]


@pytest.mark.parametrize("quiet", [True, False])
def test_without_a_terminal_a_quick_evaluation_is_silent(quiet: bool, capsys: pytest.CaptureFixture[str]) -> None:
    with evaluation_progress(quiet=quiet) as progress:
        progress({"done": 1, "total": 2, "unit": "tokens"})
    printed = capsys.readouterr()
    assert not printed.out and not printed.err
