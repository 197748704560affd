"""The CRC-32 in files and headers has zlib's values, whichever library computes it."""

import importlib
import random
import sys
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

import raypp.crc32
from raypp.crc32 import crc32

DATA = memoryview(random.Random(0).randbytes(300_000))
places = st.integers(0, len(DATA))


@given(places, places, st.integers(0, 2**32 - 1))
def test_it_is_zlibs_at_every_length_and_place(one: int, other: int, before: int) -> None:
    start, end = sorted((one, other))
    assert crc32(DATA[start:end], before) == zlib.crc32(DATA[start:end], before)


def test_a_node_without_isal_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    before = crc32(DATA)
    monkeypatch.setitem(sys.modules, "isal", None)
    monkeypatch.setitem(sys.modules, "isal.isal_zlib", None)
    try:
        without = importlib.reload(raypp.crc32)
        assert without._crc32 is zlib.crc32
        assert without.crc32(DATA) == before
    finally:
        monkeypatch.undo()
        importlib.reload(raypp.crc32)
