"""CRC-32 sums that travel with what is uploaded, to servers that compare them: found out by sending a wrong one.

The signature of a request covers its body, but not every server looks. A byte that is changed on its way is then
stored, and found only when the checkpoint is read. boto3's own sums are left to it where they are switched on (AWS).
"""

from __future__ import annotations

import base64
import secrets
import threading
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from raypp.storage.s3_errors import status_of

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

ALGORITHM: Any = "CRC32"
_READ_BYTES = 1 << 20
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

    def compared(self) -> bool:
        """Whether the server refuses a body whose sum is wrong: asked once, then remembered."""
        with self._lock:
            if self._compared is None:
                self._compared = self._ask()
            return self._compared

    def of(self, body: Any) -> dict[str, Any]:
        """What a PutObject or UploadPart of this body also says; bytes, or a file, which is then at its begin."""
        if not self.compared():
            return {}
        if isinstance(body, bytes):
            crc = zlib.crc32(body)
        else:
            crc = 0
            body.seek(0)
            while piece := body.read(_READ_BYTES):
                crc = zlib.crc32(piece, crc)
            body.seek(0)
        return {"ChecksumCRC32": _spelt(crc)}

    def _ask(self) -> bool:
        key = f".raypp-probe-{secrets.token_hex(8)}"
        name, bucket = self._server.name_of(key), self._server.bucket

        def refuses(client: S3Client) -> bool:
            if getattr(client.meta.config, "request_checksum_calculation", "") == "when_supported":
                return False  # boto3 sends sums of its own
            try:
                client.put_object(Bucket=bucket, Key=name, Body=b"sum", ChecksumCRC32=_spelt(zlib.crc32(b"other")))
            except Exception as error:
                # 400 alone may also mean that it does not know the header at all; then it must not be sent either.
                if status_of(error) != 400:
                    raise
                try:
                    client.put_object(Bucket=bucket, Key=name, Body=b"sum", ChecksumCRC32=_spelt(zlib.crc32(b"sum")))
                except Exception as second:
                    if status_of(second) == 400:
                        return False
                    raise
                client.delete_object(Bucket=bucket, Key=name)
                return True
            client.delete_object(Bucket=bucket, Key=name)
            return False

        return self._server.ask(key, refuses)


def _spelt(crc: int) -> str:
    return base64.b64encode(crc.to_bytes(4, "big")).decode()
