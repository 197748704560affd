"""What a process on CPUs does with memory it has freed: keep it for the next microbatch.

glibc gives large blocks back to the system as soon as they are free, and gets them anew, page by page, for the next
microbatch. A last stage with 8 MiB of logits met 30,000 such pages in each step, which was 4 % of it
(docs/benchmarks). Kept memory is at most what the process had at its peak.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h
_MOST = 2**31 - 1  # mallopt takes an int
_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_")


def keep_freed_memory(environment: Mapping[str, str] = os.environ) -> bool:
    """Makes this process keep what it frees.

    Whoever has set glibc's allocator by its environment variables has the last word, and other allocators go by their
    own rules.

    Returns:
        Whether it does now.
    """
    chosen = any(name in environment for name in _SETTINGS)
    if chosen or "glibc.malloc." in environment.get("GLIBC_TUNABLES", ""):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(mallopt(name, _MOST) == 1 for name in (_TRIM_THRESHOLD, _MMAP_THRESHOLD))
