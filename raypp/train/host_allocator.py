"""Makes a CPU process keep the memory it frees, for the next microbatch.

glibc returns large free blocks to the system at once, and the next microbatch faults them in again,
page by page. A last stage with 8 MiB of logits had 30,000 such page faults per step, 4 % of its
time (docs/benchmarks). The process keeps at most its peak memory.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h
_MOST = 2**31 - 1  # mallopt takes an int
_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_")


def keep_freed_memory(environment: Mapping[str, str] = os.environ) -> bool:
    """Makes this process keep the memory it frees.

    Does nothing if the user configures glibc's allocator by its environment variables, or if the
    process uses another allocator.

    Returns:
        Whether the setting was applied.
    """
    chosen = any(name in environment for name in _SETTINGS)
    if chosen or "glibc.malloc." in environment.get("GLIBC_TUNABLES", ""):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(mallopt(name, _MOST) == 1 for name in (_TRIM_THRESHOLD, _MMAP_THRESHOLD))
