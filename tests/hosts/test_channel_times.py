"""On real cables, a channel's wire is told apart from the queue at a card that several share."""

from __future__ import annotations

import json

import pytest
from beds import bare_bed, outputs
from probing import HOSTS

from raypp.planning.choose_lookahead import cards_and_links

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

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
