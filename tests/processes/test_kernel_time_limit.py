"""The driver's time limit on kernels is read from a driver that the test compiles."""

import subprocess
from pathlib import Path

from raypp.tools.doctor.device_speed import kernel_time_limit

_DRIVER = """
int cuInit(unsigned flags) { return ANSWER; }
int cuDeviceGet(int *device, int index) { *device = index; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { *value = attribute == 17 && device == 1; return 0; }
"""


def test_the_drivers_time_limit_on_kernels_is_read(tmp_path: Path) -> None:
    assert kernel_time_limit(0, str(tmp_path / "none.so")) is None
    for answer, limits in ((0, [False, True]), (100, [None, None])):
        library = tmp_path / f"libcuda-{answer}.so"
        build = ["cc", "-shared", "-fPIC", f"-DANSWER={answer}", "-x", "c", "-", "-o", str(library)]
        subprocess.run(build, input=_DRIVER, text=True, check=True)
        assert [kernel_time_limit(index, str(library)) for index in (0, 1)] == limits
