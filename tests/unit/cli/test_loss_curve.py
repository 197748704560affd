"""The loss curve drawn with characters."""

import math

from hypothesis import given
from hypothesis import strategies as st

from raypp.cli.render import loss_curve


def test_a_falling_loss_goes_from_the_top_left_to_the_bottom_right():
    lines = loss_curve([(step, 10.0 - step) for step in range(1, 9)], width=20, height=6, ascii_only=True)
    assert lines == [
        "9 +****",
        "  |    *****",
        "  |        *****",
        "2 +             ****",
        "  +-----------------",
        "   step 1          8",
    ]


def test_there_is_nothing_to_draw_before_the_second_step():
    assert loss_curve([]) == []
    assert loss_curve([(1, 2.0)]) == []
    assert loss_curve([(1, 2.0), (2, math.nan)]) == []


finite = st.floats(-1e6, 1e6)
values = st.lists(finite | st.just(math.nan) | st.just(math.inf), min_size=0, max_size=300)


@given(values, st.integers(20, 60), st.integers(4, 12), st.booleans())
def test_the_picture_keeps_to_its_size_and_the_line_is_unbroken(losses, width, height, ascii_only):
    lines = loss_curve(list(enumerate(losses, 1)), width=width, height=height, ascii_only=ascii_only)
    assert len(lines) in (0, height)
    assert all(len(line) <= width for line in lines)
    if lines:
        assert lines[-1].endswith(str(max(step for step, loss in enumerate(losses, 1) if math.isfinite(loss))))
        margin = lines[-2].index("+" if ascii_only else "└") + 1
        drawn = [line[margin:].ljust(width - margin) for line in lines[:-2]]
        columns = ["".join(column).strip() for column in zip(*drawn, strict=True)]
        assert all(columns)
