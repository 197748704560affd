"""Keeps cores busy while a benchmark runs, so that they do not go to sleep.

A hypervisor takes an idle core away from a virtual machine, and the core is slow when it returns.
On the machine of docs/benchmarks, a forward of 43 ms took 62 ms after a wait of 50 ms, in CPU time
of its own thread. Programs that wait more lose more, and the loss changes with the load of the
host. So each core runs a loop with the lowest priority (SCHED_IDLE). It has the effect of disabling
the idle states of a processor before a measurement.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_PROGRAM = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)  # ends with the process that began it
os.sched_setaffinity(0, {int(sys.argv[1])})
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
while True:
    pass
"""


@contextmanager
def cores_awake() -> Iterator[None]:
    """Keeps all cores of this process awake. Without SCHED_IDLE, prints a note and does nothing."""
    if not hasattr(os, "SCHED_IDLE"):
        print("cores are not kept awake: this system has no SCHED_IDLE")
        yield
        return
    begun = [
        subprocess.Popen([sys.executable, "-S", "-c", _PROGRAM, str(core)]) for core in sorted(os.sched_getaffinity(0))
    ]
    try:
        yield
    finally:
        for one in begun:
            one.kill()
        for one in begun:
            with contextlib.suppress(subprocess.TimeoutExpired):
                one.wait(5)
