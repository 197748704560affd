"""Documents of a run in its store."""

from __future__ import annotations

from raypp.checkpoint.commit import Commit, ObjectRecord
from raypp.checkpoint.layout import rank_key
from raypp.untrusted.documents import parse_json
from tests.fuzz import target

KEY = "run/step-00000003/COMMIT"
COMMIT = Commit(
    "run", 3, 1, {"pp": 2, "fsdp": 1}, {"model": {"kind": "llama"}}, {"data_position": {"row": 3}},
    tuple(ObjectRecord(rank_key("run", 3, 1, rank), 4096, "0" * 64, rank, 512, "1" * 64) for rank in range(2)),
    created=1.5, nonce="0123456789abcdef",
)  # fmt: skip


@target(b'{"a": [1, 2.5, "x"], "b": null}', b"[]")
def json(data: bytes) -> None:
    parse_json(data, "place")


@target(COMMIT.to_bytes())
def commit(data: bytes) -> None:
    Commit.from_bytes(data, KEY)
