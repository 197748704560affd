"""CRC-32 sums that travel with what is uploaded, to servers that compare them: found out by sending a wrong one.

The signature of a request covers its body, but not every server looks. A byte that is changed on its way is then
stored, and found only when the checkpoint is read. boto3's own sums are left to it where they are switched on (AWS).

Where the sums are compared, signing the bodies of large uploads as well would find nothing more by accident, and who
changes bytes on purpose is found out by the SHA-256 in COMMIT, which is signed. So they are left out of the signature
if the server takes that.
"""

from __future__ import annotations

import base64
import secrets
import threading
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from raypp.storage.byte_source import MemorySource
from raypp.storage.s3_errors import status_of
from raypp.storage.s3_parts import PartBody

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

ALGORITHM: Any = "CRC32"
_PROBE = b"sum"
_REFUSALS = (400, 403, 501)
T = TypeVar("T")


class _Server(Protocol):
    bucket: str

    def ask(self, key: str, request: Callable[[S3Client], T]) -> T: ...
    def name_of(self, key: str) -> str: ...


class UploadSums:
    """Whether, and which, sums are sent along.

    Args:
        server: Whom to ask.
    """

    def __init__(self, server: _Server) -> None:
        self._server = server
        self._lock = threading.Lock()
        self._compared: bool | None = None
        self._unsigned = False

    def compared(self) -> bool:
        """Whether the server refuses a body whose sum is wrong: asked once, then remembered."""
        with self._lock:
            if self._compared is None:
                self._compared, self._unsigned = self._ask()
            return self._compared

    def of(self, body: bytes | PartBody) -> dict[str, Any]:
        """What a PutObject or UploadPart of this body also says."""
        if not self.compared():
            return {}
        if isinstance(body, PartBody):
            body.summed = self._unsigned
            return {"ChecksumCRC32": _spelt(body.crc32())}
        return {"ChecksumCRC32": _spelt(zlib.crc32(body))}

    def _ask(self) -> tuple[bool, bool]:
        """Whether sums are compared, and whether a body with one needs no signature."""
        key = f".raypp-probe-{secrets.token_hex(8)}"
        name, bucket = self._server.name_of(key), self._server.bucket

        right, wrong = _spelt(zlib.crc32(_PROBE)), _spelt(zlib.crc32(b"other"))
        body = PartBody(MemorySource((len(_PROBE),), lambda _: memoryview(_PROBE)), 0, len(_PROBE))
        body.summed = True

        def takes(client: S3Client, refusals: tuple[int, ...], body: Any, crc: str) -> bool:
            try:
                client.put_object(Bucket=bucket, Key=name, Body=body, ChecksumCRC32=crc)
            except Exception as error:
                if status_of(error) not in refusals:
                    raise
                return False
            return True

        def ask(client: S3Client) -> tuple[bool, bool]:
            if getattr(client.meta.config, "request_checksum_calculation", "") == "when_supported":
                return False, False  # boto3 sends sums of its own
            blind = takes(client, (400,), _PROBE, wrong)
            # 400 alone may also mean that it does not know the header at all; then it must not be sent either.
            compares = not blind and takes(client, (400,), _PROBE, right)
            unsigned = compares and takes(client, _REFUSALS, body, right)
            if blind or compares:
                client.delete_object(Bucket=bucket, Key=name)
            return compares, unsigned

        return self._server.ask(key, ask)


def _spelt(crc: int) -> str:
    return base64.b64encode(crc.to_bytes(4, "big")).decode()
