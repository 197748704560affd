"""The CRC-32 of any range, from the CRC-32s of its blocks."""

from __future__ import annotations

import random
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypp.checkpoint.tensor_file import BLOCK_BYTES, BOUNDS, BlockSums, HeaderWriter, TensorEntry, block_digest
from raypp.errors import CheckpointError
from raypp.storage.store import MemorySource

SIZE = 3 * BLOCK_BYTES + 777
DATA = memoryview(random.Random(0).randbytes(SIZE))
places = st.integers(0, SIZE) | st.sampled_from([0, BLOCK_BYTES - 1, BLOCK_BYTES, 2 * BLOCK_BYTES, SIZE])


@given(places, places, st.binary(max_size=9))
def test_the_sum_of_a_range_is_the_one_that_reading_it_gives(one: int, other: int, before: bytes) -> None:
    start, end = sorted((one, other))
    assert BlockSums(DATA).crc32(start, end, zlib.crc32(before)) == zlib.crc32(before + bytes(DATA[start:end]))


def test_the_blocks_digests_are_what_readers_compare() -> None:
    sums = BlockSums(DATA)
    sums.crc32(100, SIZE)  # some are known already
    blocks = [DATA[start : start + BLOCK_BYTES] for start in range(0, SIZE, BLOCK_BYTES)]
    assert sums.digests() == "".join(map(block_digest, blocks))


@given(places, places)
def test_a_source_of_several_buffers_sums_over_their_borders(one: int, other: int) -> None:
    start, end = sorted((one, other))
    sums = BlockSums(DATA[1000:])
    buffers = [DATA[:1000], DATA[1000:]]

    def crc32(index: int, first: int, last: int, before: int) -> int:
        return sums.crc32(first, last, before) if index else zlib.crc32(buffers[0][first:last], before)

    for source in (
        MemorySource((1000, SIZE - 1000), buffers.__getitem__),
        MemorySource((1000, SIZE - 1000), buffers.__getitem__, crc32=crc32),
    ):
        assert source.crc32(start, end) == zlib.crc32(DATA[start:end])


def test_a_header_that_no_reader_accepts_is_not_written() -> None:
    entries = [TensorEntry(f"t{i}", "F32", (1,) * 40, 4 * i, 4 * i + 4, (1,) * 40, (0,) * 40) for i in range(10_000)]
    with pytest.raises(CheckpointError, match="10,000 tensors need a larger header"):
        HeaderWriter(entries).size(40_000, {})
    assert HeaderWriter(entries[:5_000]).size(20_000, {}) < BOUNDS.size


@pytest.mark.parametrize("shares", [1, 2, 3, 100])
def test_the_shares_of_threads_are_all_blocks(shares: int) -> None:
    sums = BlockSums(DATA)
    for share in range(shares):
        sums.compute(share, shares)
    assert None not in sums._crcs
    assert sums.digests() == BlockSums(DATA).digests()
