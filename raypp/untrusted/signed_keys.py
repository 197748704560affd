"""Values in torch's key-value store, which everybody who reaches its port may read and write."""

from __future__ import annotations

import hmac
from typing import Protocol

from raypp.errors import Problem, UnreachableError

_DIGITS = 64


class KeyValueStore(Protocol):
    """The methods of torch's store that are used."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...


class SignedKeys:
    """A store whose values begin with an HMAC-SHA-256 of the key and the value. `secret`: the
    attempt's secret, in hex digits; empty: a signature proves nothing."""

    def __init__(self, store: KeyValueStore, secret: str) -> None:
        self._store, self._secret = store, bytes.fromhex(secret)
        self.check = store.check

    def set(self, key: str, value: str) -> None:
        self._store.set(key, self._sign(key, value.encode()) + value)

    def get(self, key: str) -> bytes:
        """Returns a value, and waits for it as the store does. Raises UnreachableError: somebody
        wrote it who does not know the secret."""
        data = self._store.get(key)
        if not hmac.compare_digest(data[:_DIGITS], self._sign(key, data[_DIGITS:]).encode()):
            fault = "was written into the rendezvous by somebody who does not know the run's secret"
            raise UnreachableError(Problem(key, fault, "keep the nodes in a network of their own"))
        return data[_DIGITS:]

    def _sign(self, key: str, value: bytes) -> str:
        return hmac.digest(self._secret, f"{key}\0".encode() + value, "sha256").hex()
