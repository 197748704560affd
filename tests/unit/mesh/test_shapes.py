"""The best mesh for what is left."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypp.planning.geometry import Shape, best_shape


def shape(
    pp: int = 1, dp: int = 1, fsdp: int = 1, cp: int = 1, ep: int = 1, microbatches: int = 8, tp: int = 1
) -> Shape:
    return Shape(pp, dp, fsdp, cp, tp, ep, microbatches)


@pytest.mark.parametrize(
    ("wanted", "devices", "best"),
    [
        (shape(pp=2, fsdp=2), 4, shape(pp=2, fsdp=2)),
        (shape(pp=2, fsdp=2), 3, shape(pp=2, microbatches=16)),
        (shape(pp=2, fsdp=2), 1, shape(pp=1, microbatches=16)),
        (shape(pp=4), 3, shape(pp=3)),
        (shape(pp=2, dp=2, fsdp=2), 5, shape(pp=2, fsdp=2, microbatches=16)),
        (shape(pp=2, fsdp=4), 7, shape(pp=2, fsdp=2, microbatches=16)),
        (shape(pp=2, fsdp=3, microbatches=4), 5, shape(pp=2, fsdp=2, microbatches=6)),
        (shape(fsdp=4, ep=4), 3, None),
        (shape(pp=1, cp=4), 3, None),
        (shape(pp=2, fsdp=2, tp=2), 7, shape(pp=2, tp=2, microbatches=16)),
        (shape(pp=2, tp=4), 3, None),
    ],
)
def test_replicas_are_given_up_first_then_stages(wanted: Shape, devices: int, best: Shape | None) -> None:
    assert best_shape(wanted, devices) == best


def test_a_shape_the_schedule_cannot_run_is_passed_over() -> None:
    assert best_shape(shape(pp=4), 3, lambda one: one.pp % 2 == 0) == shape(pp=2)


def test_the_smallest_and_the_largest_world_of_the_job_hold() -> None:
    assert best_shape(shape(pp=2, fsdp=2), 3, min_ranks=3) is None
    assert best_shape(shape(pp=2, fsdp=2), 4, max_ranks=2) == shape(pp=2, microbatches=16)


_SIZES = st.integers(1, 4)


@settings(max_examples=300, deadline=None)
@given(st.builds(shape, _SIZES, _SIZES, _SIZES, st.sampled_from([1, 2]), st.just(1), st.integers(1, 12)), st.data())
def test_whatever_is_left_the_rows_of_a_step_stay_and_more_devices_are_never_worse(
    wanted: Shape, data: st.DataObject
) -> None:
    assert best_shape(wanted, wanted.world) == wanted
    devices = data.draw(st.integers(0, wanted.world))
    found = best_shape(wanted, devices)
    more = best_shape(wanted, devices + 1)
    if found is None:
        assert devices < wanted.cp
        return
    assert found.world <= devices and found.microbatches_per_step == wanted.microbatches_per_step
    assert (found.cp, found.ep) == (wanted.cp, wanted.ep)
    assert found.pp <= wanted.pp and found.dp_replicate <= wanted.dp_replicate and found.fsdp <= wanted.fsdp
    assert more is not None and (more.pp, more.replicas) >= (found.pp, found.replicas)
    if found.pp < wanted.pp:
        assert found.replicas == 1 or best_shape(wanted, devices, lambda one: one.pp > found.pp) is None
