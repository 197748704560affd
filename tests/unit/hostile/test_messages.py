"""Messages of peers that know the secret: torn, hostile, and made by a generator."""

import contextlib
import json
import socket
import struct
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypp.errors import CheckpointError, RayppError, UnreachableError
from raypp.rank.joining.preflight import Place, parse_place
from raypp.state.checkpoint.tensor_file import block_digests, encode_header
from raypp.state.memory.files import LARGEST_DATA, LARGEST_STEP, LARGEST_TAIL, SlotName, keeper
from raypp.state.memory.peer import CopyReceiver, CopySender, parse_control, parse_facts
from raypp.state.memory.slot import Slot
from raypp.untrusted import sockets
from raypp.untrusted.sockets import Listener

pytestmark = pytest.mark.filterwarnings("error")

SECRET = b"s" * 32
HERE = "127.0.0.1"
TAIL = encode_header([], memoryview(b""), {}) + b"{}"
DATA = bytes(range(256)) * 8
CONTROL: dict[str, Any] = {
    "run": "a-run", "life": "0123456789ab", "job": "0" * 16, "attempt": 3, "rank": 1, "committed": -1,
    "keeper": [7, 1.5], "layout": "1" * 16, "mesh": [1, 1, 2, 1, 1], "objects": [(0, len(DATA), len(TAIL) - 2)],
    "data_size": len(DATA), "data_crc": zlib.crc32(block_digests(memoryview(DATA)).encode()), "tail_size": len(TAIL),
    "tail_crc": zlib.crc32(TAIL), "format": 3, "complete": True, "step": 7,
}  # fmt: skip
PLACE = {
    "node": "10.0.0.1", "address": "10.0.0.1", "port": 4000, "interface": "eth0", "why": "on the route to 10.0.0.2",
    "identity": "run/1/0",
}  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def message(control: bytes | dict[str, Any] = CONTROL, length: int | None = None) -> bytes:
    """Returns the bytes of a copy with a given control block, and perhaps another length of it."""
    text = control if isinstance(control, bytes) else json.dumps(control).encode()
    return struct.pack("<I", len(text) if length is None else length) + text + TAIL + DATA


HOSTILE = {
    "a step of 13 digits": message({**CONTROL, "step": LARGEST_STEP + 1}),
    "data of 2^63 bytes": message({**CONTROL, "data_size": 2**63}),
    "data of 16 TB": message({**CONTROL, "data_size": LARGEST_DATA}),
    "a control block of 4 GB": message(length=2**32 - 1),
    "a tail of 4 GB": message({**CONTROL, "tail_size": 2**32 - 1}),
    "a tail that does not come": message({**CONTROL, "tail_size": LARGEST_TAIL}),
    "deep json": message(b"[" * 4000),
    "no json": message(b"\xff" * 100),
    "a list": message(b"[1, 2]"),
    "a number of 4,000 digits": message(b'{"rank": ' + b"9" * 3900 + b"}"),
    "an empty block": message(b""),
    "another rank": message({**CONTROL, "rank": 0}),
    "another size": message({**CONTROL, "data_size": 1}),
    "a sum in a text": message({**CONTROL, "data_crc": "0"}),
    "no sum": message({key: value for key, value in CONTROL.items() if key != "data_crc"}),
    "a name of 3 KB": message({**CONTROL, "run": "x" * 3000}),
    "a wrong sum of the data": message({**CONTROL, "data_crc": 1}),
    "a wrong sum of the tail": message({**CONTROL, "tail_crc": 1}),
    "half of a message": message()[:600],
}


@pytest.fixture
def receiver(tmp_path: Path) -> Iterator[tuple[CopyReceiver, list[Slot]]]:
    slots: list[Slot] = []

    def place(owner: int, size: int) -> Slot:
        if size > 1 << 20:
            raise OSError("no room")
        if not slots:
            slots.append(Slot.create(tmp_path, SlotName("a-run", "0123456789ab", 3, owner, "copy", 0)))
        return slots[0]

    receiver = CopyReceiver(HERE, SECRET, 2, place)
    yield receiver, slots
    receiver.close()
    for slot in slots:
        slot.close(delete=True)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_copy_ends_its_connection_and_the_next_copy_arrives(
    name: str, receiver: tuple[CopyReceiver, list[Slot]]
) -> None:
    server, slots = receiver
    with sockets.connect(HERE, server.port, SECRET, 1) as link:
        answer = b""
        with contextlib.suppress(OSError):  # closed before everything was sent
            link.sendall(HOSTILE[name])
            link.shutdown(socket.SHUT_WR)
            while part := link.recv(4096):
                answer += part
    assert answer in (b"", struct.pack("<Q?", 7, False))
    assert not slots or slots[0].read() is None
    with sockets.connect(HERE, server.port, SECRET, 1) as link:
        link.sendall(message())
        assert sockets.receive(link, 9, 10) == struct.pack("<Q?", 7, True)
    content = slots[0].read()
    assert content is not None and content[0]["keeper"] == keeper()


def test_a_rank_that_does_not_exist_places_nothing(receiver: tuple[CopyReceiver, list[Slot]]) -> None:
    with sockets.connect(HERE, receiver[0].port, SECRET, 2**63) as link:
        link.settimeout(60)
        assert link.recv(1) == b"" and not receiver[1]


@pytest.mark.parametrize("answer", [b"\xff" * 9, b"\0" * 9, b"x", b"", struct.pack("<Q?", 6, True)])
def test_a_partner_that_answers_nonsense_has_no_copy(answer: bytes, tmp_path: Path) -> None:
    def serve(link: Any, _number: int) -> None:
        sockets.receive(link, 4, 60)
        link.sendall(answer)
        link.recv(1 << 20)

    slot = Slot.create(tmp_path, SlotName("a-run", "0123456789ab", 3, 1, "own", 0))
    slot.memory(len(DATA)).fill_(1)
    slot.complete(CONTROL, TAIL)
    with Listener(HERE, SECRET, serve, "tests") as partner:
        sender = CopySender(1, (HERE, partner.port), SECRET)
        sender.offer(slot)
        assert any(sender.failures or time.sleep(0.01) for _ in range(6000))
        assert sender.arrived is None and sender.error
        assert sender.close()
    slot.close(delete=True)


@settings(derandomize=True, max_examples=60, deadline=None)
@given(st.sampled_from(sorted(CONTROL)), JSON, st.booleans())
def test_any_control_block_is_right_or_refused(key: str, value: Any, more: bool) -> None:
    document = {**CONTROL, key: value} | ({"more": value} if more else {})
    text = json.dumps(document).encode()
    _refused_or(CheckpointError, lambda: parse_control(text, "rank 1", rank=1), "rank 1")
    facts = text + b"\n" + TAIL
    _refused_or(CheckpointError, lambda: parse_facts(facts, 7, 1, "rank 1"), "rank 1")


@settings(derandomize=True, max_examples=100, deadline=None)
@given(st.sampled_from(sorted(PLACE)), JSON)
def test_any_place_of_a_node_is_right_or_refused(key: str, value: Any) -> None:
    text = json.dumps({**PLACE, key: value}).encode()
    _refused_or(UnreachableError, lambda: parse_place(text, "preflight/1"), "preflight/1")


@settings(derandomize=True, max_examples=100, deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_are_refused(data: bytes) -> None:
    _refused_or(UnreachableError, lambda: parse_place(data, "preflight/1"), "preflight/1")
    _refused_or(CheckpointError, lambda: parse_facts(data, 7, 1, "rank 1"), "rank 1")
    hello = data[:80].ljust(80)
    assert not sockets.checked_greeting(hello, SECRET, bytes(32))[2]


def _refused_or(error: type[RayppError], parse: Any, place: str) -> None:
    try:
        parse()
    except error as refusal:
        assert place in str(refusal)


def test_what_nodes_publish_today_is_accepted() -> None:
    assert parse_place(json.dumps(PLACE).encode(), "x") == Place(**PLACE)  # type: ignore[arg-type]
    text = json.dumps(CONTROL).encode()
    assert parse_facts(text + b"\n" + TAIL, 7, 1, "x") == (CONTROL, TAIL)
