"""Uploads large objects in concurrent parts, with CRC-32 checksums where the server compares them.

Parts are in memory only while they are sent, under a rate limit. Not every server checks a body
against its signature, so a probe shows whether it compares checksums. If it does, the signature
omits the bodies where the server accepts that: SHA-256 in COMMIT, which is signed, finds deliberate
changes. On AWS boto3 sends checksums; raypp computes those of large uploads, which is faster.
"""

from __future__ import annotations

import base64
import copy
import hashlib
import secrets
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

from raypp.crc32 import crc32
from raypp.storage.rate_limit import LOW_PRIORITY
from raypp.storage.store import Data, MemorySource, NotFound

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

    from raypp.storage.s3 import S3Store

PART_BYTES = 16 << 20
"""Objects up to this size take one request, larger ones parts of this size, or up to twice it."""
_ROUNDS = 2
"""Larger parts, as long as each thread sends this many: a request costs milliseconds of CPU."""
PARTS_IN_FLIGHT = 4
"""Number of parts of one object uploaded at once; a stream holds one more in memory at most."""
_MOST_PARTS = 9000
_LONGEST_PIECE = 4 << 20
_FAST_S = 0.02
"""Pieces double while each takes less than this, so that few system calls and thread switches are
made, and the socket's timeout covers no more than a moment of a slow network."""
_PRIORITY_FILLER = 1
"""Linux's TC_PRIO_FILLER: last in the sender's own queue."""
_ALGORITHM: Any = "CRC32"
_PROBE = b"sum"
_REFUSALS = (400, 403, 501)


def upload_in_parts(server: S3Store, key: str, name: str, chunks: Iterable[Data], size: int) -> None:
    """Writes an object from chunks. If it raises, nothing appears; the parts are aborted or expire.
    `chunks`: its bytes; each chunk must not change until the next one is requested."""
    summed: Any = {"ChecksumAlgorithm": _ALGORITHM} if server.sums.compared() else {}
    upload = server.send(key, "create_multipart_upload", Key=name, **summed)["UploadId"]
    try:
        parts = _upload_parts(server, key, name, upload, chunks, size)
        _complete(server, key, name, upload, parts)
    except BaseException:
        server.send_once("abort_multipart_upload", Key=name, UploadId=upload)
        raise


def _complete(server: S3Store, key: str, name: str, upload: str, parts: list[dict[str, Any]]) -> None:
    """Joins the parts. If the response of an earlier try was lost, the upload no longer exists,
    because the object does: then the object's ETag is checked."""
    try:
        server.send(key, "complete_multipart_upload", Key=name, UploadId=upload, MultipartUpload={"Parts": parts})
    except NotFound:
        tag = server.send(key, "head_object", Key=name)["ETag"]
        if tag.strip('"') != _tag_of_parts(parts):
            raise


def _tag_of_parts(parts: list[dict[str, Any]]) -> str:
    """Returns S3's ETag of an object of these parts: the MD5 of their MD5s, and their number."""
    digests = [part["ETag"].strip('"') for part in parts]
    try:
        joined = b"".join(bytes.fromhex(digest) for digest in digests)
    except ValueError:
        return ""  # the ETags of an encrypting server are not MD5s
    return f"{hashlib.md5(joined, usedforsecurity=False).hexdigest()}-{len(parts)}"


def _upload_parts(
    server: S3Store, key: str, name: str, upload: str, chunks: Iterable[Data], size: int
) -> list[dict[str, Any]]:
    """Uploads the parts as the chunks arrive; returns what the completion needs."""
    bodies: Iterable[bytes | PartBody]
    part_bytes = max(server.part_bytes, -(-size // _MOST_PARTS))
    if isinstance(chunks, MemorySource):
        if not chunks.pace.bytes_per_s:  # larger parts take no more memory
            part_bytes = max(part_bytes, min(-(-size // (_ROUNDS * PARTS_IN_FLIGHT)), 2 * server.part_bytes))
        bodies = (PartBody(chunks, at, min(at + part_bytes, size)) for at in range(0, size, part_bytes))
    else:
        bodies = cut_into_parts(key, chunks, size, part_bytes)

    def send(number: int, body: bytes | PartBody) -> dict[str, Any]:
        checksum = server.sums.of(body)
        answer = server.send(key, "upload_part", Key=name, UploadId=upload, PartNumber=number, Body=body, **checksum)
        sums = {field: answer[field] for field in answer if field.startswith("Checksum") and field != "ChecksumType"}
        return {"PartNumber": number, "ETag": answer["ETag"], **sums, **checksum}

    futures: list[Future[dict[str, Any]]] = []
    with ThreadPoolExecutor(PARTS_IN_FLIGHT, thread_name_prefix="raypp-upload") as pool:
        try:
            for number, body in enumerate(bodies, start=1):
                running = [future for future in futures if not future.done()]
                if len(running) >= PARTS_IN_FLIGHT:
                    wait(running, return_when="FIRST_COMPLETED")
                for future in futures:
                    if future.done():
                        future.result()
                futures.append(pool.submit(send, number, body))
            return [future.result() for future in futures]
        except BaseException:
            for future in futures:
                future.cancel()
            raise


def cut_into_parts(key: str, chunks: Iterable[Data], size: int, part_bytes: int) -> Iterator[bytes]:
    """Yields the chunks, cut and joined into parts of `part_bytes`; the last may be shorter."""
    part = bytearray()
    seen = 0
    for chunk in chunks:
        view = memoryview(chunk).cast("B")
        seen += len(view)
        while len(view):
            taken = view[: part_bytes - len(part)]
            part += taken
            view = view[len(taken) :]
            if len(part) == part_bytes:
                yield bytes(part)
                part = bytearray()
    if seen != size:
        raise ValueError(f"{key}: the chunks have {seen} bytes, but {size} were announced")
    if part:
        yield bytes(part)


class PartBody:
    """A part as the file object that boto3 expects; reads return views of the memory. The rate
    limit applies only while a part is sent, not while it is read for a signature or a checksum."""

    def __init__(self, source: MemorySource, start: int, end: int) -> None:
        self._source, self._start, self._end = source, start, end
        self._views = source.views(start, end)
        self._place = 0
        self._piece_bytes, self._handed_at = source.pace.piece_bytes, 0.0
        self.sending = False
        self.summed = False
        """Whether a header carries its CRC-32 and the server compares it. The signature then omits
        the body: signing costs a SHA-256 of every byte on both sides, more than everything else
        together."""

    def __len__(self) -> int:
        return self._end - self._start

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = 0) -> int:
        self._place = offset + (0, self._place, len(self))[whence]
        self._piece_bytes, self._handed_at = self._source.pace.piece_bytes, 0.0
        return self._place

    def crc32(self) -> int:
        return self._source.crc32(self._start, self._end)

    def read(self, size: int | None = -1) -> memoryview | bytes:
        """Returns the next piece as a view. While sending, the rate limit and the network set the
        piece's size, whatever was requested: boto3's HTTP client requests 16 KiB, each of which
        would cost a system call and a thread switch."""
        wanted = self._next_piece() if self.sending or size is None or size < 0 else size
        begin = 0
        for view in self._views:
            if self._place < begin + len(view):
                piece = view[self._place - begin :][:wanted]
                if self.sending:
                    self._source.pace.take(len(piece))
                self._place += len(piece)
                self._handed_at = time.monotonic()
                return piece
            begin += len(view)
        return b""

    def _next_piece(self) -> int:
        """Returns the bytes of the next piece; the last one has been sent when it is asked for."""
        pace = self._source.pace
        if pace.bytes_per_s or not self.sending:
            return pace.piece_bytes
        if self._handed_at:
            fast = time.monotonic() - self._handed_at < _FAST_S
            self._piece_bytes = min(2 * self._piece_bytes, _LONGEST_PIECE) if fast else pace.piece_bytes
        return self._piece_bytes


def prepare_client(client: S3Client) -> None:
    """Makes a client send `PartBody`s under their rate limit, with low priority where possible.
    Must be called before the client's first request."""
    # The signer listens to this event too; "last" on an operation's own event still precedes it.
    client.meta.events.register_first("request-created.s3", _signing)
    client.meta.events.register_last("request-created.s3", _sending)
    # botocore has no setting for socket options; its session passes this list to new connections.
    options = getattr(getattr(getattr(client, "_endpoint", None), "http_session", None), "_socket_options", None)
    if isinstance(options, list):
        options.extend(low_priority_options())


def low_priority_options() -> list[tuple[int, int, int]]:
    """Returns the socket options for low-priority traffic that this machine accepts."""
    wanted = [(socket.IPPROTO_IP, socket.IP_TOS, LOW_PRIORITY)]
    if hasattr(socket, "SO_PRIORITY"):
        wanted.append((socket.SOL_SOCKET, socket.SO_PRIORITY, _PRIORITY_FILLER))
    accepted = []
    with socket.socket() as scratch:
        for option in wanted:
            try:
                scratch.setsockopt(*option)
            except OSError:
                continue
            accepted.append(option)
    return accepted


def _signing(request: Any, **_others: Any) -> None:
    if isinstance(request.data, PartBody):
        request.data.seek(0)  # this may be a retry of the part
        request.data.sending = False
        if request.data.summed:
            # botocore has this setting only per client; the context belongs to the request.
            config = copy.copy(request.context["client_config"])
            config.s3 = {**(config.s3 or {}), "payload_signing_enabled": False}
            request.context["client_config"] = config


def _sending(request: Any, **_others: Any) -> None:
    if isinstance(request.data, PartBody):
        request.data.sending = True


class UploadSums:
    """Decides whether uploads carry checksums. `server`: the server to probe."""

    def __init__(self, server: S3Store) -> None:
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
        from botocore.exceptions import ClientError

        key = f".raypp-probe-{secrets.token_hex(8)}"
        name, bucket = self._server.name_of(key), self._server.bucket

        right, wrong = _encode(crc32(_PROBE)), _encode(crc32(b"other"))
        body = PartBody(MemorySource([memoryview(_PROBE)]), 0, len(_PROBE))
        body.summed = True

        def takes(client: S3Client, refusals: tuple[int, ...], body: Any, crc: str) -> bool:
            try:
                client.put_object(Bucket=bucket, Key=name, Body=body, ChecksumCRC32=crc)
            except ClientError as error:
                if error.response.get("ResponseMetadata", {}).get("HTTPStatusCode") not in refusals:
                    raise
                return False
            return True

        def ask(client: S3Client) -> tuple[bool, bool]:
            if getattr(client.meta.config, "request_checksum_calculation", "") == "when_supported":
                self._boto3_sums = True
                # As boto3 does, which omits the body from the signature only under TLS.
                return True, str(client.meta.endpoint_url).startswith("https:")
            blind = takes(client, (400,), _PROBE, wrong)
            # 400 may also mean that the server does not know the header: then it must not be sent.
            compares = not blind and takes(client, (400,), _PROBE, right)
            unsigned = compares and takes(client, _REFUSALS, body, right)
            if blind or compares:
                client.delete_object(Bucket=bucket, Key=name)
            return compares, unsigned

        return self._server.ask(key, ask)


def _encode(crc: int) -> str:
    return base64.b64encode(crc.to_bytes(4, "big")).decode()
