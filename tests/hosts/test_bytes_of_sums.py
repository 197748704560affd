"""Gradient sums over a cable send each rank only its own part. Without Ray."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from cluster.testbed import TestBed, why_not

pytestmark = [pytest.mark.hosts, pytest.mark.slow, pytest.mark.timeout(240)]

_PROGRAM = str(Path(__file__).parent / "summing.py")
_NEEDED = 4_000_000
"""Bytes of the other rank's part: half of two million numbers of four bytes."""


def test_a_sum_of_gradients_sends_half_of_them_and_not_all() -> None:
    """gloo's own reduce-scatter of two ranks sends the whole vector each way."""
    if reason := why_not():
        pytest.skip(reason)
    with TestBed.up(f"s{time.monotonic_ns() % 10**6}", hosts=2, rate="1gbit", ray=False, store=False) as bed:
        cable = Path(f"/sys/class/net/{bed.network.cable(1)}/statistics/rx_bytes")
        before, address = int(cable.read_text()), bed.network.address(0)
        commands = [[sys.executable, _PROGRAM, str(rank), address] for rank in range(2)]
        ranks = [bed.popen(host, command, stdout=subprocess.PIPE, text=True) for host, command in enumerate(commands)]
        told = [process.communicate(timeout=120)[0] for process in ranks]
        assert told == ["right", "right"]
        assert _NEEDED < int(cable.read_text()) - before < 1.1 * _NEEDED
