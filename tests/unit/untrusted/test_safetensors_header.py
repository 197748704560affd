import json
from typing import Any

import pytest

from raypp.errors import CheckpointError
from raypp.untrusted.safetensors_header import MOST_BYTES, MOST_TENSORS, header_length, parse_header

_GOOD = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


def _text(**tensors: Any) -> bytes:
    return json.dumps(tensors).encode()


def _with(**changed: Any) -> bytes:
    return _text(w={**_GOOD, **changed})


def test_a_header_is_read_with_its_metadata_in_the_order_of_the_file() -> None:
    after = {"dtype": "BF16", "shape": [], "data_offsets": [24, 26]}
    empty = {"dtype": "F64", "shape": [0, 7], "data_offsets": [24, 24]}
    header = parse_header(_text(z=after, a=_GOOD, e=empty, __metadata__={"format": "pt"}) + b"   ", 30, "file")
    assert list(header.tensors) == ["z", "a", "e"]
    assert header.tensors["a"] == ("F32", (2, 3), 0, 24)
    assert header.metadata == {"format": "pt"}
    assert header.data_bytes == 26
    assert parse_header(b"{}", 0, "file").tensors == {}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "is not JSON"),
        (b"[]", "not a JSON object"),
        (b'{"w": 1}', 'tensor "w" is not described by data_offsets, dtype, shape'),
        (b'{"w": {}, "w": {}}', 'it has "w" twice'),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"w": [' + b"[]," * MOST_TENSORS * 20 + b"[]]}", "values; at most"),
        (b"[" + b'{"a":"b"},' * 1000 + b"{}]", "too many objects that are not tensors"),
        (_text(__metadata__={"format": 1}), "__metadata__ is not an object of texts"),
        (_with(dtype="F8_E5M2"), 'cannot read the dtype "F8_E5M2"'),
        (_with(dtype=["F32"]), "cannot read the dtype a list"),
        (_with(shape=[-2, -3]), "shape is not a list"),
        (_with(shape=[1] * 65), "shape is not a list"),
        (_with(shape=[2**63]), "shape is not a list"),
        (_with(shape=[2**62] * 64), "does not match its shape"),
        (_with(data_offsets=[0, 20]), "its byte count 20 does not match its shape (F32, 24 bytes)"),
        (_with(data_offsets=[-24, 0]), "not two whole numbers"),
        (_with(more=1), 'tensor "w" is not described by'),
        (_with(data_offsets=[10**18, 10**18 + 24]), 'is torn: 100 bytes of data are there, "w" ends at byte'),
        (_text(v=_GOOD, w={**_GOOD, "data_offsets": [20, 44]}), 'tensors "v" and "w" overlap'),
        (_text(**{"\x1b]0;t\x07": 1}), r'tensor "\u001b]0;t\u0007" is not'),
    ],
)
def test_what_does_not_fit_is_refused_with_its_place(text: bytes, said: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        parse_header(text, 100, "model/part.safetensors")
    assert str(caught.value).startswith("model/part.safetensors: ")
    assert said in str(caught.value)
    assert len(str(caught.value)) < 400


def test_a_file_with_too_many_tensors_is_refused() -> None:
    text = ",".join(f'"{n}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}' for n in range(MOST_TENSORS + 1))
    with pytest.raises(CheckpointError, match="it has 100,001 tensors; at most 100,000 are read"):
        parse_header(f"{{{text}}}".encode(), 0, "file")


def test_the_length_is_within_the_file_and_the_format() -> None:
    assert header_length((12).to_bytes(8, "little") + b"more", None, "file") == 12
    assert header_length((MOST_BYTES).to_bytes(8, "little"), MOST_BYTES + 8, "file") == MOST_BYTES
    for first, size, said in [
        (b"1234567", None, "is not a safetensors file: it has 7 bytes"),
        ((10**18).to_bytes(8, "little"), None, "would have 1,000,000,000,000,000,000 bytes"),
        ((100).to_bytes(8, "little"), 107, "is torn: 107 bytes are there, its header alone ends at byte 108"),
    ]:
        with pytest.raises(CheckpointError) as caught:
            header_length(first, size, "file")
        assert said in str(caught.value)
