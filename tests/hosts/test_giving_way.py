"""A capped upload gives way to gloo's messages on the same cable, and proceeds. Without Ray."""

from __future__ import annotations

import json

import pytest
from beds import bare_bed, outputs

from raypp.storage.rate_limit import YIELDED

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

_CAP_MBPS = 20.0
_UPLOAD_S = (1 << 20) * 8 / (_CAP_MBPS * 1e6)


def test_a_capped_upload_gives_way_to_messages_of_the_training_and_not_for_ever() -> None:
    """The messages follow each other on a cable of 50 Mbit/s for longer than the upload lasts."""
    messages = int(3 * (1 + YIELDED) * _UPLOAD_S * 50e6 / 8 / (1 << 20))
    with bare_bed(2, "50mbit") as bed:
        addresses = ",".join(bed.network.address(host) for host in range(2))
        facts = json.loads(outputs(bed, "giving_way.py", addresses, str(_CAP_MBPS), str(messages))[0])
    assert not facts["before"], "nothing is under way between two idle ranks"
    assert facts["sending"], "the messages lasted longer than the upload"
    alone_s, beside_s = facts["yielded_s"]
    assert alone_s == 0, "an upload does not give way to itself"
    assert beside_s > 0
