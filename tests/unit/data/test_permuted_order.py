import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypp.rank.data.packing import permuted


@settings(deadline=None)
@given(count=st.integers(1, 3000), seed=st.integers(0, 2**40), epoch=st.integers(0, 100))
def test_every_thing_is_visited_exactly_once(count: int, seed: int, epoch: int) -> None:
    assert np.array_equal(np.sort(permuted(np.arange(count), count, seed, epoch)), np.arange(count))


@settings(max_examples=30, deadline=None)
@given(count=st.integers(1, 2000), data=st.data())
def test_any_part_of_an_order_can_be_had_alone(count: int, data: st.DataObject) -> None:
    begin = data.draw(st.integers(0, count - 1))
    end = data.draw(st.integers(begin, count))
    whole = permuted(np.arange(count), count, 3, 1)
    assert np.array_equal(permuted(np.arange(begin, end), count, 3, 1), whole[begin:end])


def test_a_part_of_a_huge_order_is_cheap_and_inside() -> None:
    count = 10**12
    part = permuted(np.arange(count - 1000, count), count, 0, 0)
    assert len(set(part.tolist())) == 1000
    assert part.min() >= 0 and part.max() < count


def test_another_seed_or_epoch_is_another_order() -> None:
    orders = [permuted(np.arange(100), 100, *key).tolist() for key in ((0, 0), (0, 1), (1, 0), (1, 1))]
    assert len({tuple(order) for order in orders}) == 4


def test_the_order_is_the_same_on_every_machine_and_for_every_version() -> None:
    assert permuted(np.arange(10), 10, 0, 0).tolist() == [9, 5, 7, 4, 3, 2, 8, 6, 0, 1]


def test_things_move_as_far_as_in_a_random_order() -> None:
    # In a uniformly random order of n items the mean of |i - order(i)| is n/3; here within 3 % for
    # n = 5000.
    count = 5000
    for seed in range(5):
        order = permuted(np.arange(count), count, seed, 0)
        assert np.abs(order - np.arange(count)).mean() == pytest.approx(count / 3, rel=0.03)


def test_each_thing_comes_first_equally_often() -> None:
    firsts = [int(permuted(np.arange(1), 8, seed, 0)[0]) for seed in range(1000)]
    counts = np.bincount(firsts, minlength=8)
    assert np.abs(counts - 125).max() < 52  # 5 standard deviations
