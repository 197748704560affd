"""The rendezvous is open to everybody who reaches it: what others write there is not believed."""

import json
import secrets

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from raypp.errors import UnreachableError
from raypp.state.checkpoint.announce import Announcements
from raypp.untrusted.sockets import SignedKeys


def test_a_forged_commit_is_not_believed_and_a_true_one_is() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ours, secret = Announcements(server, 1, "aa" * 32), "aa" * 32
    for forged in (json.dumps({"committed": True}), "0" * 64 + json.dumps({"committed": True}), ""):
        server.set("raypp-checkpoint/1/5/-1", forged)
        with pytest.raises(UnreachableError, match=r"raypp-checkpoint/1/5/-1: was written .* does not know the run's"):
            ours.wait_all(5, [-1], 1.0)
    Announcements(server, 1, secrets.token_hex(32)).announce(5, -1, {"committed": True})  # another run's
    with pytest.raises(UnreachableError, match="does not know"):
        ours.wait_all(5, [-1], 1.0)
    Announcements(server, 1, secret).announce(5, -1, {"committed": True})
    assert ours.wait_all(5, [-1], 1.0) == {-1: {"committed": True}}
    server.set("raypp-checkpoint/1/6/-1", server.get("raypp-checkpoint/1/5/-1").decode())  # of another step
    with pytest.raises(UnreachableError, match="raypp-checkpoint/1/6/-1"):
        ours.wait_all(6, [-1], 1.0)
    Announcements(server, 1, secret).progress(7, 0, 12)
    server.set("raypp-checkpoint/1/7/0/progress", "13")
    with pytest.raises(UnreachableError, match="progress"):
        ours.wait_all(7, [0], 0.0)


def test_values_are_read_as_they_were_written() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    keys = SignedKeys(server, "bb" * 32)
    for value in ("", "é\0\n", "x" * 100_000):
        keys.set("key", value)
        assert keys.check(["key"]) and keys.get("key") == value.encode()
