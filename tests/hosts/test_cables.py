"""What ranks send over cables: sums, timed channels, uploads that give way. Without Ray."""

import json
from pathlib import Path

import pytest
from beds import bare_bed, outputs
from probing import HOSTS

from raypp.planning.choose_lookahead import cards_and_links
from raypp.storage.rate_limit import YIELDED

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def sent(program: str, *arguments: str) -> int:
    with bare_bed(2, "1gbit") as bed:
        cable = Path(f"/sys/class/net/{bed.network.cable(1)}/statistics/rx_bytes")
        before = int(cable.read_text())
        assert outputs(bed, program, bed.network.address(0), *arguments) == ["right", "right"]
        return int(cable.read_text()) - before


def test_sums_over_two_replicas_send_four_bytes_a_number_and_in_int8_one() -> None:
    numbers = 2_000**2
    assert 4 * numbers < sent("replica_summing.py", "exact") < 1.05 * 4 * numbers
    assert numbers * 260 / 256 < sent("replica_summing.py", "int8") < 1.05 * numbers * 260 / 256


_BYTES = 512 * 1024


def test_the_host_between_two_others_shares_its_card() -> None:
    with bare_bed(HOSTS, "20mbit") as bed:
        printed = outputs(bed, "probing.py", bed.network.address(0), str(_BYTES))
    times = [row for rank in printed for row in json.loads(rank)]
    assert sorted((source, to) for source, to, *_ in times) == [(0, 1), (1, 0), (1, 2), (2, 1)]
    wire, crowded = [0.0] * HOSTS, [0.0] * HOSTS
    for source, to, alone, among_others in times:
        border = min(source, to)
        wire[border] = max(wire[border], alone)
        crowded[border] = max(crowded[border], among_others)
    cards, _ = cards_and_links([0, 1, 2], [0, 1, 2], wire, crowded)
    assert cards == [None, 1, None], (wire, crowded)


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
