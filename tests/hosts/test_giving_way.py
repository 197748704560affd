"""A capped upload gives way to gloo's messages on the same cable, and proceeds. Without Ray."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cluster.testbed import TestBed, why_not
from raypp.storage.rate_limit import YIELDED

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

_PROGRAM = str(Path(__file__).parent / "giving_way.py")
_CAP_MBPS = 20.0
_UPLOAD_S = (1 << 20) * 8 / (_CAP_MBPS * 1e6)


def test_a_capped_upload_gives_way_to_messages_of_the_training_and_not_for_ever() -> None:
    """The messages follow each other on a cable of 50 Mbit/s for longer than the upload lasts."""
    if reason := why_not():
        pytest.skip(reason)
    messages = int(3 * (1 + YIELDED) * _UPLOAD_S * 50e6 / 8 / (1 << 20))
    with TestBed.up(f"y{time.monotonic_ns() % 10**6}", hosts=2, rate="50mbit", ray=False, store=False) as bed:
        addresses = ",".join(bed.network.address(host) for host in range(2))
        ranks = [
            bed.popen(
                host,
                [sys.executable, _PROGRAM, str(host), addresses, str(_CAP_MBPS), str(messages)],
                stdout=subprocess.PIPE,
                text=True,
            )
            for host in range(2)
        ]
        said = [process.communicate(timeout=120)[0] for process in ranks]
    told = json.loads(said[0])
    assert not told["before"], "nothing is under way between two idle ranks"
    assert told["sending"], "the messages lasted longer than the upload"
    alone_s, beside_s = told["yielded_s"]
    assert alone_s == 0, "an upload does not give way to itself"
    assert beside_s > 0
