"""The pieces in which a part in memory is sent: large where the network is fast, all bytes once."""

import random
import time
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypp.storage.rate_limit import Pace
from raypp.storage.s3_upload import PartBody
from raypp.storage.store import MemorySource

SIZE = 64 << 20
FIRST = Pace().piece_bytes
places = st.integers(0, 3000) | st.sampled_from([0, 999, 1000, 1001, 3000])


def sending(pace: Pace | None = None) -> tuple[PartBody, memoryview]:
    data = memoryview(bytearray(SIZE))
    body = PartBody(MemorySource([data[:1000], data[1000:]], pace), 0, SIZE)
    body.sending = True
    return body, data


@given(places, places)
def test_the_sum_of_a_range_goes_over_the_borders_of_buffers(one: int, other: int) -> None:
    start, end = sorted((one, other))
    data = memoryview(random.Random(0).randbytes(3000))
    source = MemorySource([data[:1000], data[1000:1000], data[1000:]])
    assert source.crc32(start, end) == zlib.crc32(data[start:end])
    assert b"".join(source.views(start, end)) == data[start:end]


def test_pieces_grow_while_they_leave_fast_and_are_all_bytes_once() -> None:
    body, data = sending()
    for number in range(0, SIZE, 4096):
        data[number] = number >> 12 & 255
    sizes, joined = [], bytearray()
    while piece := body.read(16384):
        sizes.append(len(piece))
        joined += piece
    assert joined == data
    assert sizes[0] == 1000, "a piece is of one buffer"
    assert sizes[1] <= 2 * FIRST
    assert max(sizes) >= 4 * FIRST, "64 MiB of reads without sending include fast ones on any machine"
    assert max(sizes) <= 4 << 20


def test_after_a_slow_piece_they_are_small_again() -> None:
    """So the socket's timeout, which covers a whole piece, covers no more than before."""
    body, _ = sending()
    while len(body.read(16384)) < 2 * FIRST:
        pass
    time.sleep(0.05)
    assert len(body.read(16384)) == FIRST
    body.seek(0)
    body.read(16384)
    assert len(body.read(16384)) <= 2 * FIRST, "a repeated part begins anew"


def test_under_a_cap_they_are_what_the_cap_lets_through_in_a_moment() -> None:
    pace = Pace(1e9)
    body, _ = sending(pace)
    assert {len(body.read(16384)) for _ in range(20)} == {1000, pace.piece_bytes}


@pytest.mark.parametrize("size", [10, 1000, 16384])
def test_reads_for_a_signature_are_of_the_size_that_was_asked_for(size: int) -> None:
    body, _ = sending()
    body.sending = False
    assert len(body.read(size)) == min(size, 1000)
