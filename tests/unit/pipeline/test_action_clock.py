"""The times of actions: how long backwards take, and by how much they vary."""

import pytest
import torch

from raypp.planning.schedules.action import Kind
from raypp.stages.pipeline.device_clock import ActionClock, Span


def clock_with(times: dict[tuple[Kind, bool], list[float]]) -> ActionClock:
    clock = ActionClock(torch.device("cpu"))
    for (kind, message), seconds in times.items():
        clock._spans[kind, 0, message] = [Span(0.0, one) for one in seconds]
    return clock


def test_the_spread_is_half_the_distance_of_the_tenths_relative_to_the_median() -> None:
    even = [0.9 + 0.2 * index / 100 for index in range(101)]
    assert clock_with({("F", False): even}).spread() == pytest.approx(0.08, abs=0.002)
    assert clock_with({("F", False): even, ("B", False): [2.0] * 20}).spread() == pytest.approx(0.04, abs=0.001)


def test_one_late_action_and_messages_do_not_count_and_few_report_nothing() -> None:
    assert clock_with({("F", False): [1.0] * 31 + [9.0]}).spread() == 0
    assert clock_with({("F", False): [1.0] * 20, ("F", True): [1.0, 9.0] * 10}).spread() == 0
    assert clock_with({("F", False): [1.0, 2.0, 3.0]}).spread() == 0


@pytest.mark.parametrize(
    ("times", "backward"),
    [
        ({"B": 3.0}, (3.0, 0.0)),
        ({"I": 1.0, "W": 2.0}, (3.0, 1.0)),
        ({"B": 3.3, "I": 1.0, "W": 2.0}, (3.3, 1.1)),
        ({"B": 3.0, "W": 2.0}, (3.0, 0.0)),  # the first stage's input needs no gradient
    ],
    ids=["whole", "in halves", "some in halves", "first stage"],
)
def test_a_backward_counts_once_also_where_some_are_in_halves(
    times: dict[Kind, float], backward: tuple[float, float]
) -> None:
    found = clock_with({(kind, False): [seconds] * 3 for kind, seconds in {"F": 1.0, **times}.items()})
    assert found.backwards()[0] == pytest.approx(backward)
