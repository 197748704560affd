"""All benchmarks, one after another: `make bench`. Each prints its own tables; takes half an hour on two cores."""

from __future__ import annotations

import subprocess
import sys

for module in ("throughput", "startup", "saves", "lengths", "schedules", "dispatch", "memory", "wire", "link_hiding"):
    print(f"\n== {module}", flush=True)
    subprocess.run([sys.executable, "-m", f"benchmarks.{module}"], check=True)
