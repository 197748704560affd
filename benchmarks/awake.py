"""Cores that stay awake while a benchmark runs.

A core of a virtual machine that has nothing to do is taken away, and comes back slow: on the machine of docs/benchmarks
a forward of 43 ms took 62 ms after a wait of 50 ms, in CPU time of its own thread. Whoever waits most loses most by
that, and by how much changes with what else the host does. So each core gets something to do that gives way to
everything (SCHED_IDLE), as one sets a processor's idle states aside before measuring.
"""

from __future__ import annotations

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
    """Keeps all cores this process may use awake. Where the system knows no SCHED_IDLE, nothing is done, and said."""
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
