"""Reading a job does not import torch: families are found and declared without it."""

from __future__ import annotations

import subprocess
import sys

from raypp.spec.families import FAMILIES

PROGRAM = "import sys; from raypp.spec.families import FAMILIES; print(*FAMILIES); sys.exit('torch' in sys.modules)"


def test_families_are_found_and_declared_without_torch() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()) == (0, list(FAMILIES)), done.stderr
