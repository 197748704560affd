"""On real cables, a channel's wire is told apart from the queue at a card that several share."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from probing import HOSTS

from cluster.testbed import TestBed, why_not
from raypp.planning.choose_lookahead import cards_and_links

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

_PROGRAM = str(Path(__file__).parent / "probing.py")
_BYTES = 512 * 1024


def test_the_host_between_two_others_shares_its_card() -> None:
    if reason := why_not():
        pytest.skip(reason)
    with TestBed.up(f"q{time.monotonic_ns() % 10**6}", hosts=HOSTS, rate="20mbit", ray=False, store=False) as bed:
        commands = [[sys.executable, _PROGRAM, str(rank), bed.network.address(0), str(_BYTES)] for rank in range(HOSTS)]
        ranks = [bed.popen(host, command, stdout=subprocess.PIPE, text=True) for host, command in enumerate(commands)]
        told = [row for process in ranks for row in json.loads(process.communicate(timeout=120)[0])]
    assert sorted((source, to) for source, to, *_ in told) == [(0, 1), (1, 0), (1, 2), (2, 1)]
    wire, crowded = [0.0] * HOSTS, [0.0] * HOSTS
    for source, to, alone, among_others in told:
        border = min(source, to)
        wire[border] = max(wire[border], alone)
        crowded[border] = max(crowded[border], among_others)
    cards, _ = cards_and_links([0, 1, 2], [0, 1, 2], wire, crowded)
    assert cards == [None, 1, None], (wire, crowded)
