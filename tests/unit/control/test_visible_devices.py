"""The device that Ray assigned, as this process names it."""

import pytest

from raypp.control.rank_process import device_position
from raypp.errors import ResourcesError

ONE, OTHER = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "GPU-1a2b3c4d-0000-1111-2222-333344445555"
MIG, OTHER_MIG = "MIG-0a1b2c3d-0000-5555-8888-999900001111", "MIG-ffffffff-0000-5555-8888-999900001111"


@pytest.mark.parametrize(
    ("assigned", "visible", "position"),
    [
        ("0", None, 0),
        ("0", "0", 0),
        ("6", "4,5,6,7", 2),
        ("5", " 4, 5 ,6", 1),
        ("0", "1,0,-1,2", 1),
        (OTHER, f"{ONE},{OTHER}", 1),
        ("GPU-8932", f"{ONE},{OTHER}", 0),
        (MIG, MIG, 0),
        ("MIG-GPU-8932f937/1/0", "MIG-GPU-8932f937/1/0", 0),
    ],
)
def test_the_position_in_cuda_visible_devices_counts(assigned: str, visible: str | None, position: int) -> None:
    assert device_position(assigned, visible) == position


@pytest.mark.parametrize(
    ("assigned", "visible", "fault"),
    [
        (ONE, None, "is not set"),
        ("0", "", "is empty"),
        ("3", "4,5", "does not contain"),
        ("0", ONE, "does not contain"),
        ("1", "1,1", "names 1 twice"),
        ("2", "0,-1,2", "ignores .* from '-1' on"),
        ("1", f"0,{ONE},1", f"from '{ONE}' on"),
        (MIG, f"{ONE},{MIG}", f"from '{MIG}' on"),
        (OTHER_MIG, f"{MIG},{OTHER_MIG}", "only the first MIG instance"),
    ],
)
def test_a_device_that_cuda_does_not_show_is_refused(assigned: str, visible: str | None, fault: str) -> None:
    with pytest.raises(ResourcesError, match=fault) as refused:
        device_position(assigned, visible)
    assert refused.value.problems[0].fix and refused.value.problems[0].key == "resources.device"
