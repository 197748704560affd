"""An S3 server that bounds no writer: it reads bodies and drops them.

A server that stores needs more CPU time per byte than any writer, so writers beside it all look
alike. This one answers as S3 does (objects, conditional writes, listings, multipart uploads, sums)
but keeps only objects of up to `KEPT_BYTES`: COMMIT and the like. The kernel drops the bytes of
larger bodies without copying them to this process. Their checksums and signatures are not
compared, which a real server does in its own time.

`Sink.start()` starts one as a process; it ends with the process that started it.
"""

from __future__ import annotations

import base64
import datetime
import itertools
import mmap
import os
import re
import secrets
import socket
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from email.utils import formatdate
from html import escape, unescape
from pathlib import Path
from typing import IO
from urllib.parse import parse_qs, quote, unquote, urlsplit

from raypp.storage.s3 import S3Store

KEPT_BYTES = 64 << 10
_MOST_HEADER_BYTES = 64 << 10
_DROPPED_AT_ONCE = 4 << 20
_KEY = "sink"
_REASONS = {
    200: "OK", 204: "No Content", 206: "Partial Content", 400: "Bad Request", 404: "Not Found",
    412: "Precondition Failed", 416: "Range Not Satisfiable", 501: "Not Implemented",
}  # fmt: skip


@dataclass(frozen=True)
class Sink:
    """A running sink, with what the benchmark needs of a server.

    Attributes:
        endpoint: `http://127.0.0.1:PORT`, for AWS_ENDPOINT_URL_S3.
        pid: Its process.
    """

    endpoint: str
    pid: int
    _process: subprocess.Popen[str]

    @classmethod
    def start(cls) -> Sink:
        command = [sys.executable, "-m", "benchmarks.sink"]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1]
        )
        assert process.stdout is not None
        endpoint = process.stdout.readline().strip()
        if not endpoint:
            raise RuntimeError(f"the sink ended with code {process.wait()}")
        return cls(endpoint, process.pid, process)

    def store(self, bucket: str, prefix: str = "") -> S3Store:
        return S3Store(bucket, prefix, endpoint=self.endpoint, access_key=_KEY, secret_key=_KEY)

    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL_S3": self.endpoint, "AWS_ACCESS_KEY_ID": _KEY, "AWS_SECRET_ACCESS_KEY": _KEY,
            "AWS_REGION": "us-east-1",
        }  # fmt: skip

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


class Refused(Exception):
    """An error answer of S3."""

    def __init__(self, status: int, code: str, message: str = "") -> None:
        super().__init__(code)
        self.status, self.code, self.message = status, code, message


@dataclass(frozen=True)
class Stored:
    """An object.

    Attributes:
        size: Bytes.
        body: Its bytes; None if they were dropped.
        modified: When it was written.
        tag: Its ETag.
    """

    size: int
    body: bytes | None
    modified: datetime.datetime
    tag: str


@dataclass
class Upload:
    """An unfinished multipart upload.

    Attributes:
        key: Bucket and key.
        begun: When it was created.
        parts: Bytes of each part.
    """

    key: str
    begun: datetime.datetime
    parts: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Request:
    """A request whose body has been read.

    Attributes:
        method: GET, PUT …
        key: Bucket and key, or the bucket alone.
        query: Its parameters.
        headers: By lower-case name.
        size: Bytes of the body, without aws-chunked's framing.
        body: None if it was dropped.
    """

    method: str
    key: str
    query: dict[str, str]
    headers: dict[str, str]
    size: int
    body: bytes | None


@dataclass(frozen=True)
class Answer:
    body: bytes = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)


class Shelf:
    """All objects and uploads of a sink."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._objects: dict[str, Stored] = {}
        self._uploads: dict[str, Upload] = {}
        self._numbers = itertools.count(1)

    def answer(self, request: Request) -> Answer:
        """Does what a request asks for.

        Raises:
            Refused: It cannot be done.
        """
        _compare_sum(request)
        in_bucket, what = "/" in request.key, (request.method, *(name for name in _QUERIES if name in request.query))
        with self._lock:
            match (in_bucket, *what):
                case (True, "PUT", "uploadId"):
                    return self._put_part(request)
                case (True, "PUT"):
                    return self._put(request)
                case (True, "POST", "uploads"):
                    return self._create(request)
                case (True, "POST", "uploadId"):
                    return self._complete(request)
                case (True, "DELETE", "uploadId"):
                    if self._uploads.pop(request.query["uploadId"], None) is None:
                        raise Refused(404, "NoSuchUpload")
                    return Answer(status=204)
                case (True, "DELETE"):
                    self._objects.pop(request.key, None)
                    return Answer(status=204)
                case (True, "GET" | "HEAD"):
                    return self._get(request)
                case (False, "POST", "delete"):
                    return self._delete(request)
                case (False, "GET", "uploads"):
                    return self._list_uploads(request)
                case (False, "GET", "location"):
                    return _document("<LocationConstraint/>")
                case (False, "GET"):
                    return self._list(request)
                case (False, "HEAD" | "PUT"):
                    return Answer()
        raise Refused(501, "NotImplemented", f"{request.method} {request.key} {' '.join(request.query)}")

    def _put(self, request: Request) -> Answer:
        if request.headers.get("if-none-match") == "*" and request.key in self._objects:
            raise Refused(412, "PreconditionFailed")
        tag = self._tag()
        self._objects[request.key] = Stored(request.size, request.body, _now(), tag)
        return Answer(headers={"ETag": tag, **_sums(request)})

    def _put_part(self, request: Request) -> Answer:
        upload = self._upload(request)
        upload.parts[int(request.query["partNumber"])] = request.size
        return Answer(headers={"ETag": self._tag(), **_sums(request)})

    def _create(self, request: Request) -> Answer:
        name = secrets.token_hex(16)
        self._uploads[name] = Upload(request.key, _now())
        bucket, _, key = request.key.partition("/")
        return _document(
            f"<InitiateMultipartUploadResult><Bucket>{escape(bucket)}</Bucket><Key>{escape(key)}</Key>"
            f"<UploadId>{name}</UploadId></InitiateMultipartUploadResult>"
        )

    def _complete(self, request: Request) -> Answer:
        upload, text = self._upload(request), (request.body or b"").decode()
        named = [int(number) for number in re.findall(r"<PartNumber>(\d+)</PartNumber>", text)]
        if not named or named != sorted(named) or not set(named) <= upload.parts.keys():
            raise Refused(400, "InvalidPart", "a part is missing, or the list is not in order")
        del self._uploads[request.query["uploadId"]]
        tag = self._tag()
        self._objects[request.key] = Stored(sum(upload.parts[number] for number in named), None, _now(), tag)
        bucket, _, key = request.key.partition("/")
        return _document(
            f"<CompleteMultipartUploadResult><Bucket>{escape(bucket)}</Bucket><Key>{escape(key)}</Key>"
            f"<ETag>{escape(tag)}</ETag></CompleteMultipartUploadResult>"
        )

    def _upload(self, request: Request) -> Upload:
        upload = self._uploads.get(request.query["uploadId"])
        if upload is None or upload.key != request.key:
            raise Refused(404, "NoSuchUpload")
        return upload

    def _get(self, request: Request) -> Answer:
        found = self._objects.get(request.key)
        if found is None:
            raise Refused(404, "NoSuchKey")
        headers = {"ETag": found.tag, "Last-Modified": formatdate(found.modified.timestamp(), usegmt=True)}
        if request.method == "HEAD":
            return Answer(headers={**headers, "Content-Length": str(found.size)})
        if found.body is None:
            raise Refused(501, "NotImplemented", f"the sink keeps objects of up to {KEPT_BYTES} bytes")
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("range", ""))
        if wanted is None:
            return Answer(found.body, headers=headers)
        first, last = int(wanted[1]), min(int(wanted[2] or found.size), found.size - 1)
        if first >= found.size:
            raise Refused(416, "InvalidRange")
        headers["Content-Range"] = f"bytes {first}-{last}/{found.size}"
        return Answer(found.body[first : last + 1], 206, headers)

    def _delete(self, request: Request) -> Answer:
        for key in re.findall(r"<Key>(.*?)</Key>", (request.body or b"").decode(), re.DOTALL):
            self._objects.pop(f"{request.key}/{unescape(key)}", None)
        return _document("<DeleteResult/>")

    def _list(self, request: Request) -> Answer:
        query, name = request.query, quote if request.query.get("encoding-type") == "url" else escape
        prefix, mark, most = query.get("prefix", ""), query.get("delimiter"), int(query.get("max-keys", "1000"))
        after = query.get("continuation-token") or query.get("start-after") or ""
        found: dict[str, str] = {}
        for key, one in sorted(self._below(request.key, prefix)):
            end = key.find(mark, len(prefix)) if mark else -1
            if end >= 0:
                folder = key[: end + len(mark or "")]
                found[folder] = f"<CommonPrefixes><Prefix>{name(folder)}</Prefix></CommonPrefixes>"
            else:
                found[key] = (
                    f"<Contents><Key>{name(key)}</Key><LastModified>{_iso(one.modified)}</LastModified>"
                    f"<ETag>{escape(one.tag)}</ETag><Size>{one.size}</Size></Contents>"
                )
        left = [key for key in found if key > after]
        more = f"<NextContinuationToken>{escape(left[most - 1])}</NextContinuationToken>" if len(left) > most else ""
        encoding = "<EncodingType>url</EncodingType>" if name is quote else ""
        return _document(
            f"<ListBucketResult><Prefix>{name(prefix)}</Prefix>{encoding}<KeyCount>{len(left[:most])}</KeyCount>"
            f"<IsTruncated>{'true' if more else 'false'}</IsTruncated>{more}"
            f"{''.join(found[key] for key in left[:most])}</ListBucketResult>"
        )

    def _list_uploads(self, request: Request) -> Answer:
        name = quote if request.query.get("encoding-type") == "url" else escape
        found = "".join(
            f"<Upload><Key>{name(key)}</Key><UploadId>{upload_id}</UploadId>"
            f"<Initiated>{_iso(upload.begun)}</Initiated></Upload>"
            for upload_id, upload in self._uploads.items()
            if (key := upload.key.removeprefix(f"{request.key}/")).startswith(request.query.get("prefix", ""))
        )
        encoding = "<EncodingType>url</EncodingType>" if name is quote else ""
        return _document(
            f"<ListMultipartUploadsResult>{encoding}<IsTruncated>false</IsTruncated>{found}"
            "</ListMultipartUploadsResult>"
        )

    def _below(self, bucket: str, prefix: str) -> Iterator[tuple[str, Stored]]:
        for key, one in self._objects.items():
            if key.startswith(f"{bucket}/{prefix}"):
                yield key[len(bucket) + 1 :], one

    def _tag(self) -> str:
        return f'"{next(self._numbers):032x}"'


_QUERIES = ("uploads", "uploadId", "delete", "location")
"""Parameters that make a request another one."""


def _compare_sum(request: Request) -> None:
    """Raises Refused if the body is not the one whose CRC-32 was sent."""
    told = request.headers.get("x-amz-checksum-crc32")
    if told and request.body is not None and _encoded(zlib.crc32(request.body)) != told:
        raise Refused(400, "BadDigest", "the CRC-32 does not match")


def _encoded(crc: int) -> str:
    return base64.b64encode(crc.to_bytes(4, "big")).decode()


def _sums(request: Request) -> dict[str, str]:
    """Returns the checksums of a request's header, which S3 repeats."""
    return {
        name: value
        for name, value in request.headers.items()
        if name.startswith("x-amz-checksum-") and name not in ("x-amz-checksum-algorithm", "x-amz-checksum-type")
    }


def _document(text: str) -> Answer:
    body = f'<?xml version="1.0" encoding="UTF-8"?>\n{text}'.encode()
    return Answer(body, headers={"Content-Type": "application/xml"})


def _now() -> datetime.datetime:
    return datetime.datetime.now(tz=datetime.UTC)


def _iso(moment: datetime.datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%S.000Z")


class Connection:
    """Serves the requests of one connection, one after the other."""

    def __init__(self, connected: socket.socket, shelf: Shelf, nowhere: memoryview) -> None:
        self._socket, self._shelf, self._nowhere = connected, shelf, nowhere
        self._read = bytearray()
        """Received and not used yet."""

    def serve(self) -> None:
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._socket, suppress(ConnectionError):
            while (request := self._request()) is not None:
                try:
                    answer = self._shelf.answer(request)
                except Refused as refused:
                    text = f"<Error><Code>{refused.code}</Code><Message>{escape(refused.message)}</Message></Error>"
                    answer = Answer(_document(text).body, refused.status, {"Content-Type": "application/xml"})
                self._send(answer, with_body=request.method != "HEAD")

    def _send(self, answer: Answer, with_body: bool) -> None:
        headers = {"Content-Length": str(len(answer.body)), "x-amz-request-id": "sink", **answer.headers}
        lines = [f"HTTP/1.1 {answer.status} {_REASONS[answer.status]}", *(f"{k}: {v}" for k, v in headers.items())]
        self._socket.sendall("\r\n".join([*lines, "", ""]).encode() + (answer.body if with_body else b""))

    def _request(self) -> Request | None:
        """Reads a request; returns None at the connection's end."""
        head = self._until(b"\r\n\r\n")
        if head is None:
            return None
        first, *lines = head.decode("latin-1").split("\r\n")
        method, target, _version = first.split(" ")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        if headers.get("expect", "").lower() == "100-continue":
            self._socket.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        size, body = self._body(headers)
        address = urlsplit(target)
        query = {name: values[0] for name, values in parse_qs(address.query, keep_blank_values=True).items()}
        return Request(method, unquote(address.path).strip("/"), query, headers, size, body)

    def _body(self, headers: dict[str, str]) -> tuple[int, bytes | None]:
        """Reads a body; returns its size, and its bytes if they are few."""
        if headers.get("transfer-encoding", "").lower() == "chunked":
            body = self._chunked()
        else:
            size = int(headers.get("content-length", "0"))
            decoded = int(headers.get("x-amz-decoded-content-length", size))
            if size > KEPT_BYTES:
                self._drop(size)
                return decoded, None
            body = self._exactly(size)
        if headers.get("x-amz-content-sha256", "").startswith("STREAMING-"):
            body = _unframed(body)
        return len(body), body if len(body) <= KEPT_BYTES else None

    def _drop(self, size: int) -> None:
        """Lets the kernel drop the next bytes."""
        here = min(size, len(self._read))
        del self._read[:here]
        left = size - here
        while left:
            dropped = self._socket.recv_into(
                self._nowhere, min(left, len(self._nowhere)), socket.MSG_TRUNC | socket.MSG_WAITALL
            )
            if not dropped:
                raise ConnectionResetError("a body was cut off")
            left -= dropped

    def _chunked(self) -> bytes:
        body = bytearray()
        while True:
            line = self._until(b"\r\n")
            if line is None:
                raise ConnectionResetError("a body was cut off")
            size = int(bytes(line).partition(b";")[0], 16)
            body += self._exactly(size)
            self._exactly(2)
            if not size:
                return bytes(body)

    def _exactly(self, size: int) -> bytes:
        while len(self._read) < size:
            self._receive()
        found = bytes(self._read[:size])
        del self._read[:size]
        return found

    def _until(self, end: bytes) -> bytearray | None:
        """Returns the bytes before `end`, which is taken too; None if nothing comes any more."""
        while (place := self._read.find(end)) < 0:
            if len(self._read) > _MOST_HEADER_BYTES:
                raise ConnectionResetError("a header is too long")
            try:
                self._receive()
            except ConnectionResetError:
                return None
        found = self._read[:place]
        del self._read[: place + len(end)]
        return found

    def _receive(self) -> None:
        piece = self._socket.recv(KEPT_BYTES)
        if not piece:
            raise ConnectionResetError("the connection was closed")
        self._read += piece


def _unframed(body: bytes) -> bytes:
    """Removes aws-chunked's framing."""
    found, place = bytearray(), 0
    while place < len(body):
        end = body.index(b"\r\n", place)
        size = int(body[place:end].partition(b";")[0], 16)
        if not size:
            break
        found += body[end + 2 : end + 2 + size]
        place = end + 2 + size + 2
    return bytes(found)


def serve(listener: socket.socket) -> None:
    """Serves each connection in a thread, forever."""
    shelf = Shelf()
    nowhere = memoryview(mmap.mmap(-1, _DROPPED_AT_ONCE))
    while True:
        connected, _ = listener.accept()
        threading.Thread(target=Connection(connected, shelf, nowhere).serve, daemon=True).start()


def _end_with(parent: IO[str]) -> None:
    parent.read()
    os._exit(0)


def main() -> None:
    threading.Thread(target=_end_with, args=(sys.stdin,), daemon=True).start()
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
        serve(listener)


if __name__ == "__main__":
    main()
