"""Hosts of a test bed without Ray, and programs with a rank on each."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cluster.testbed import TestBed, why_not


def bed_name() -> str:
    return f"b{time.monotonic_ns() % 10**6}"


@contextmanager
def bare_bed(hosts: int, rate: str) -> Iterator[TestBed]:
    """Sets up hosts with cables of this rate; skips the test where none can be made."""
    if reason := why_not():
        pytest.skip(reason)
    with TestBed.up(bed_name(), hosts=hosts, rate=rate, ray=False, store=False) as bed:
        yield bed


def outputs(bed: TestBed, program: str, *arguments: str) -> list[str]:
    """Runs `program RANK ARGUMENTS` of this folder on every host; returns what each printed."""
    path = str(Path(__file__).parent / program)
    ranks = [
        bed.popen(rank, [sys.executable, path, str(rank), *arguments], stdout=subprocess.PIPE, text=True)
        for rank in range(bed.size)
    ]
    return [process.communicate(timeout=120)[0] for process in ranks]
