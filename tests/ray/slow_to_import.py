"""A stand-in whose import takes as long as importing torch does on a loaded machine."""

from __future__ import annotations

import time

time.sleep(9)

from stand_in import leave, run_rank  # noqa: E402

__all__ = ["leave", "run_rank"]
