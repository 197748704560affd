"""Memory of a rank on CPUs: large blocks that are freed serve the next microbatch without new pages."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
import torch
from raypp.train.heap import keep_freed_memory

kept = keep_freed_memory() if sys.argv[1] == "kept" else None
def step():
    blocks = [torch.ones(3_000_000) for _ in range(4)]  # 12 MB each
step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def new_pages(way: str, **settings: str) -> tuple[str, int]:
    environment = {name: value for name, value in os.environ.items() if "MALLOC" not in name} | settings
    done = subprocess.run([sys.executable, "-c", PROGRAM, way], env=environment, capture_output=True, text=True)
    kept, pages = done.stdout.split()
    return kept, int(pages)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator")
def test_steps_of_equal_size_get_hardly_any_new_pages() -> None:
    """Ten steps need 117,000 pages where all is given back, and a block or two (2,930 each) where it is kept."""
    kept, pages = new_pages("kept")
    _, without = new_pages("as glibc does")
    assert kept == "True" and 10 * pages < without, (pages, without)


@pytest.mark.parametrize(
    "setting",
    [{"MALLOC_TRIM_THRESHOLD_": "131072"}, {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=131072"}],
    ids=["variable", "tunable"],
)
def test_what_the_user_has_set_stays(setting: dict[str, str]) -> None:
    kept, pages = new_pages("kept", **setting)
    assert kept == "False" and pages > 1000
