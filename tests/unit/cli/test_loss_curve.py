"""The loss curve drawn with characters."""

import math

from hypothesis import strategies as st

from raypp.cli.render import loss_curve


def test_a_falling_loss_goes_from_the_top_left_to_the_bottom_right():
    lines = loss_curve([(step, 10.0 - step) for step in range(1, 9)], width=20, height=6, ascii_only=True)
    assert lines == [
        "9 +****", "  |    *****", "  |        *****", "2 +             ****", "  +-----------------",
        "   step 1          8",
    ]  # fmt: skip


def test_there_is_nothing_to_draw_before_the_second_step():
    assert loss_curve([]) == []
    assert loss_curve([(1, 2.0)]) == []
    assert loss_curve([(1, 2.0), (2, math.nan)]) == []


finite = st.floats(-1e6, 1e6)
values = st.lists(finite | st.just(math.nan) | st.just(math.inf), min_size=0, max_size=300)
