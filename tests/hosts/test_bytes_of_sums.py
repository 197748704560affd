"""Gradient sums over a cable send each rank only its own part. Without Ray."""

from __future__ import annotations

from pathlib import Path

import pytest
from beds import bare_bed, outputs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

_NEEDED = 4_000_000
"""Bytes of the other rank's part: half of two million numbers of four bytes."""


def sent(program: str, *arguments: str) -> int:
    """Runs two ranks on two hosts, and returns the bytes that the second has sent."""
    with bare_bed(2, "1gbit") as bed:
        cable = Path(f"/sys/class/net/{bed.network.cable(1)}/statistics/rx_bytes")
        before = int(cable.read_text())
        assert outputs(bed, program, bed.network.address(0), *arguments) == ["right", "right"]
        return int(cable.read_text()) - before


def test_a_sum_of_gradients_sends_half_of_them_and_not_all() -> None:
    """gloo's own reduce-scatter of two ranks sends the whole vector each way."""
    assert _NEEDED < sent("summing.py") < 1.1 * _NEEDED


def test_sums_over_two_replicas_send_four_bytes_a_number_and_in_int8_one() -> None:
    numbers = 2_000**2
    assert 4 * numbers < sent("replica_summing.py", "exact") < 1.05 * 4 * numbers
    assert numbers * 260 / 256 < sent("replica_summing.py", "int8") < 1.05 * numbers * 260 / 256
