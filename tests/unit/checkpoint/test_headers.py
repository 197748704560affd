"""Headers of objects, with the checksums of all blocks."""

import random
import zlib

import pytest

from raypp.errors import CheckpointError
from raypp.state.checkpoint.tensor_file import BLOCK_BYTES, BOUNDS, HeaderWriter, TensorEntry, block_digests

DATA = memoryview(random.Random(0).randbytes(3 * BLOCK_BYTES + 777))


def test_each_block_has_the_digits_of_its_crc() -> None:
    blocks = [DATA[start : start + BLOCK_BYTES] for start in range(0, len(DATA), BLOCK_BYTES)]
    assert block_digests(DATA) == "".join(f"{zlib.crc32(block):08x}" for block in blocks)
    assert block_digests(DATA[:0]) == ""


def test_a_header_that_no_reader_accepts_is_not_written() -> None:
    entries = [TensorEntry(f"t{i}", "F32", (1,) * 40, 4 * i, 4 * i + 4, (1,) * 40, (0,) * 40) for i in range(10_000)]
    with pytest.raises(CheckpointError, match="10,000 tensors need a larger header"):
        HeaderWriter(entries).encode("00000000", {})
    assert len(HeaderWriter(entries[:5_000]).encode("00000000", {})) < BOUNDS.size
