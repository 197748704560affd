import json
import tracemalloc
from dataclasses import dataclass, field
from typing import Any

import pytest
from counted_calls import counted_calls
from hypothesis import given
from hypothesis import strategies as st

from raypp.errors import CheckpointError
from raypp.untrusted.documents import Count, parse_as, parse_json

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


@dataclass(frozen=True)
class Part:
    key: str
    size: Count


@dataclass(frozen=True)
class Whole:
    run: str
    parts: tuple[Part, ...]
    loss: float = 0.0
    extra: dict[str, Any] = field(default_factory=dict)


def text(**changes: Any) -> bytes:
    return json.dumps({"run": "a", "parts": [{"key": "k", "size": 3}], **changes}).encode()


def test_a_document_of_the_shape_is_read() -> None:
    assert parse_as(Whole, text(loss=1), "COMMIT") == Whole("a", (Part("k", 3),), 1.0)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (text(parts=[{"key": "k", "size": -1}]), "COMMIT: parts[0].size is -1: should be greater than or equal to 0"),
        (text(parts=[{"key": "k", "size": 2**64}]), "parts[0].size is 18446744073709551616"),
        (text(parts=[{"key": "k", "size": 1.5}]), "parts[0].size is 1.5"),
        (text(parts=[{"key": 7, "size": 1}]), "parts[0].key is 7"),
        (text(parts=[{"size": 1}]), "parts[0].key is missing"),
        (text(more=1), "more is not a known key"),
        (text(**{"\x1b[2J": 1}), "\\x1b[2J is not a known key"),
        (text(run="\x1b]0;title\x07", parts=None), "parts is null"),
        (b"[]", "is a list"),
        (b"\xff", "is not JSON"),
        (b"[" * 100_000 + b"]" * 100_000, "is not JSON"),
        (b'{"run": ' + b"9" * 5000 + b"}", "COMMIT: "),
    ],
)
def test_any_other_is_reported_by_the_place_of_the_fault(data: bytes, said: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        parse_as(Whole, data, "COMMIT")
    assert said in str(caught.value) and "\x1b" not in str(caught.value)


@pytest.mark.parametrize("data", [b"NaN", b"[Infinity]", b"1e", b"[" * 100_000, b"9" * 5000, b"\xff\xfe", b"{1: 2}"])
def test_what_is_no_json_is_reported(data: bytes) -> None:
    with pytest.raises(CheckpointError, match="place"):
        parse_json(data, "place")


@pytest.mark.parametrize(
    "data", [b"[]," * 2_000_000, b"[" + b"[]," * 1_000_000 + b"0]", b'"' + b"a" * (17 << 20) + b'"']
)
def test_too_much_is_refused_before_it_takes_memory(data: bytes) -> None:
    tracemalloc.start()
    for parse in (parse_json, lambda data, place: parse_as(Whole, data, place)):
        with counted_calls() as calls, pytest.raises(CheckpointError, match="at most"):
            parse(data, "place")
        assert calls.count < 1000
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


@given(values)
def test_whatever_json_says_it_is_read_or_refused(value: Any) -> None:
    data = json.dumps(value).encode()
    for place in ("COMMIT",):
        try:
            parse_as(Whole, data, place)
        except CheckpointError as error:
            assert str(error).startswith(place)
    try:
        assert json.dumps(parse_json(data, "place")) == json.dumps(value)
    except CheckpointError as error:
        assert "NaN" in str(error) or "Infinity" in str(error)


@given(st.binary())
def test_whatever_the_bytes_are_they_are_read_or_refused(data: bytes) -> None:
    try:
        parse_json(data, "place")
    except CheckpointError as error:
        assert str(error).startswith("place")
