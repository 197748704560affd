"""What peers send: greetings, copies of snapshots, the places where nodes listen."""

import json
import zlib

from raypp.rank.joining.preflight import parse_place
from raypp.state.memory.peer import parse_control, parse_facts
from raypp.untrusted.sockets import GREETING_BYTES, checked_greeting, greeting, greeting_fits
from tests.fuzz import target

SECRET = b"s" * 32
RANDOM = bytes(32)
TAIL = b'{"tensors":[],"extra":{}}'
DATA_BYTES = 2048
CONTROL = json.dumps(
    {
        "run": "a-run", "life": "0123456789ab", "job": "0" * 16, "attempt": 3, "rank": 1, "committed": -1,
        "keeper": [7, 1.5], "layout": "1", "mesh": [1, 1, 2, 1, 1], "objects": [[0, 2048, 9]],
        "data_size": DATA_BYTES, "data_crc": 1, "tail_size": len(TAIL),
        "tail_crc": zlib.crc32(TAIL), "format": 3, "complete": True, "step": 7,
    }
).encode()  # fmt: skip
PLACE = json.dumps(
    {
        "node": "10.0.0.1", "address": "10.0.0.1", "port": 4000, "interface": "eth0", "why": "on the route to 10.0.0.2",
        "identity": "run/1/0",
    }
).encode()  # fmt: skip


@target(greeting(SECRET, 1, RANDOM, RANDOM))
def hello(data: bytes) -> None:
    heard = data[:GREETING_BYTES]
    if greeting_fits(heard) and len(heard) == GREETING_BYTES:
        number, theirs, fits = checked_greeting(heard, SECRET, RANDOM)
        if fits:
            assert heard == greeting(SECRET, number, RANDOM, theirs)


@target(CONTROL)
def control(data: bytes) -> None:
    parse_control(data, "rank 1", rank=1)


@target(CONTROL + b"\n" + TAIL)
def facts(data: bytes) -> None:
    parse_facts(data, 7, 1, "rank 1")


@target(PLACE)
def place(data: bytes) -> None:
    parse_place(data, "preflight/1")
