"""Memory of a rank on CPUs: large freed blocks stay with the process for the next microbatch."""

import os
import sys

import pytest
from programs import run_python

PROGRAM = """
import os, sys
import torch
from raypp.rank.joining.process_group import keep_freed_memory

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGESIZE")

kept = keep_freed_memory() if sys.argv[1] == "kept" else None
blocks = [torch.ones(3_000_000) for _ in range(4)]  # 12 MB each
before = resident()
del blocks
print(kept, (before - resident()) // 10**6)
"""
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator")


def given_back(way: str, **settings: str) -> tuple[str, int]:
    """Returns whether freed memory is kept, and how many of 48 MB go back to the system."""
    environment = {name: value for name, value in os.environ.items() if "MALLOC" not in name} | settings
    kept, megabytes = run_python("-c", PROGRAM, way, env=environment).stdout.split()
    return kept, int(megabytes)


@pytest.mark.gate
def test_what_is_freed_stays_with_the_process() -> None:
    kept, megabytes = given_back("kept")
    assert kept == "True" and megabytes < 12
    assert given_back("as glibc does")[1] >= 36


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting",
    [{"MALLOC_TRIM_THRESHOLD_": "131072"}, {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=131072"}],
    ids=["variable", "tunable"],
)
def test_what_the_user_has_set_stays(setting: dict[str, str]) -> None:
    kept, megabytes = given_back("kept", **setting)
    assert kept == "False" and megabytes >= 36
