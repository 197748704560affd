"""Sends CRC-32 checksums with uploads to servers that compare them, as a probe shows.

The signature of a request covers its body, but not every server checks that. A byte changed in
transit is then stored, and detected only when the checkpoint is read.

Where boto3's own checksums are enabled (AWS), the server compares them, and raypp adds those of
large uploads only: it has them already, and boto3 would read every byte once more.

If the server compares checksums, signing the bodies of large uploads as well would detect no more
accidents; deliberate changes are detected by the SHA-256 in COMMIT, which is signed. So the
signature omits the bodies if the server accepts that.
"""

from __future__ import annotations

import base64
import secrets
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from raypp.crc32 import crc32
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
    """Decides whether uploads carry checksums.

    Args:
        server: The server to probe.
    """

    def __init__(self, server: _Server) -> None:
        self._server = server
        self._lock = threading.Lock()
        self._compared: bool | None = None
        self._unsigned = False
        self._boto3_sums = False

    def compared(self) -> bool:
        """Returns whether the server rejects a body with a wrong checksum: probed once."""
        with self._lock:
            if self._compared is None:
                self._compared, self._unsigned = self._ask()
            return self._compared

    def of(self, body: bytes | PartBody) -> dict[str, Any]:
        """Returns further arguments of a PutObject or UploadPart with this body."""
        if not self.compared():
            return {}
        if isinstance(body, PartBody):
            body.summed = self._unsigned
            return {"ChecksumCRC32": _encode(body.crc32())}
        return {} if self._boto3_sums else {"ChecksumCRC32": _encode(crc32(body))}

    def _ask(self) -> tuple[bool, bool]:
        """Returns whether checksums are compared, and whether a body with one may be unsigned."""
        key = f".raypp-probe-{secrets.token_hex(8)}"
        name, bucket = self._server.name_of(key), self._server.bucket

        right, wrong = _encode(crc32(_PROBE)), _encode(crc32(b"other"))
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
                self._boto3_sums = True
                # As boto3 does, which omits the body from the signature only under TLS.
                return True, str(client.meta.endpoint_url).startswith("https:")
            blind = takes(client, (400,), _PROBE, wrong)
            # 400 may also mean that the server does not know the header: then it must not be sent
            # either.
            compares = not blind and takes(client, (400,), _PROBE, right)
            unsigned = compares and takes(client, _REFUSALS, body, right)
            if blind or compares:
                client.delete_object(Bucket=bucket, Key=name)
            return compares, unsigned

        return self._server.ask(key, ask)


def _encode(crc: int) -> str:
    return base64.b64encode(crc.to_bytes(4, "big")).decode()
