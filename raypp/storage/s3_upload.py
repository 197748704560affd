"""Uploads large objects in concurrent parts, which are in memory only while they are sent."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from raypp.storage.byte_source import MemorySource
from raypp.storage.s3_parts import send_parts
from raypp.storage.s3_sums import ALGORITHM, UploadSums
from raypp.storage.store import Data, NotFound

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

PART_BYTES = 16 << 20
"""Objects up to this size take one request, larger ones parts of this size, or up to twice it."""
_ROUNDS = 2
"""Larger parts, as long as each thread sends this many: a request costs milliseconds of CPU."""
PARTS_IN_FLIGHT = 4
"""Number of parts of one object uploaded at once; a stream holds one more in memory at most."""
_MOST_PARTS = 9000
T = TypeVar("T")


class _Server(Protocol):
    bucket: str
    part_bytes: int
    sums: UploadSums

    def ask(self, key: str, request: Callable[[S3Client], T]) -> T: ...
    def ask_once(self, request: Callable[[S3Client], T]) -> T | None: ...


def upload_in_parts(server: _Server, key: str, name: str, chunks: Iterable[Data], size: int) -> None:
    """Writes an object from chunks. If it raises, nothing appears; the parts are aborted or expire.

    Args:
        server: Sends requests with retries.
        key: The object's key, for messages.
        name: Its name in the bucket.
        chunks: Its bytes; each chunk must not change until the next one is requested.
        size: Total bytes.
    """
    summed: Any = {"ChecksumAlgorithm": ALGORITHM} if server.sums.compared() else {}
    upload = server.ask(
        key, lambda client: client.create_multipart_upload(Bucket=server.bucket, Key=name, **summed)["UploadId"]
    )
    try:
        parts = _upload_parts(server, key, name, upload, chunks, size)
        _complete(server, key, name, upload, parts)
    except BaseException:
        server.ask_once(lambda client: client.abort_multipart_upload(Bucket=server.bucket, Key=name, UploadId=upload))
        raise


def _complete(server: _Server, key: str, name: str, upload: str, parts: list[dict[str, Any]]) -> None:
    """Joins the parts.

    If the response of an earlier try was lost, the upload no longer exists, because the object
    does: then the object's ETag is checked.
    """
    more: Any = {"Parts": parts}
    try:
        server.ask(
            key,
            lambda client: client.complete_multipart_upload(
                Bucket=server.bucket, Key=name, UploadId=upload, MultipartUpload=more
            ),
        )
    except NotFound:
        tag = server.ask(key, lambda client: client.head_object(Bucket=server.bucket, Key=name)["ETag"])
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
    server: _Server, key: str, name: str, upload: str, chunks: Iterable[Data], size: int
) -> list[dict[str, Any]]:
    """Uploads the parts as the chunks arrive; returns what the completion needs."""
    in_memory = isinstance(chunks, MemorySource) and not chunks.pace.bytes_per_s  # larger parts take no more memory
    even = min(-(-size // (_ROUNDS * PARTS_IN_FLIGHT)), 2 * server.part_bytes) if in_memory else 0
    part_bytes = max(server.part_bytes, even, -(-size // _MOST_PARTS))
    futures: list[Future[dict[str, Any]]] = []

    def send(number: int, body: Any) -> dict[str, Any]:
        own = server.sums.of(body)

        def request(client: S3Client) -> Any:
            if hasattr(body, "seek"):
                body.seek(0)  # an earlier try may have read a part of it
            return client.upload_part(
                Bucket=server.bucket, Key=name, UploadId=upload, PartNumber=number, Body=body, **own
            )

        answer = server.ask(key, request)
        sums = {field: answer[field] for field in answer if field.startswith("Checksum") and field != "ChecksumType"}
        sums.update(own)
        return {"PartNumber": number, "ETag": answer["ETag"], **sums}

    if isinstance(chunks, MemorySource):
        return send_parts(chunks, part_bytes, PARTS_IN_FLIGHT, send)
    with ThreadPoolExecutor(PARTS_IN_FLIGHT, thread_name_prefix="raypp-upload") as pool:
        try:
            for number, part in enumerate(cut_into_parts(key, chunks, size, part_bytes), start=1):
                running = [future for future in futures if not future.done()]
                if len(running) >= PARTS_IN_FLIGHT:
                    wait(running, return_when="FIRST_COMPLETED")
                for future in futures:
                    if future.done():
                        future.result()
                futures.append(pool.submit(send, number, part))
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


def joined(key: str, chunks: Iterable[Data], size: int) -> bytes:
    """Returns all chunks as one bytes object.

    Raises:
        ValueError: They do not add up to `size`.
    """
    data = b"".join(chunks)
    if len(data) != size:
        raise ValueError(f"{key}: the chunks have {len(data)} bytes, but {size} were announced")
    return data
