"""Reads what an S3 server answers, within limits: it may be anything.

A body is believed to have the length that was asked for or announced, a document (a listing, an
error) to be short and without a DOCTYPE, a number to be the size of an object.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Any

from raypp.errors import Problem
from raypp.storage.store import MOST_WHOLE_BYTES, StoreError, too_large
from raypp.storage.watched import PIECE_BYTES, arrived
from raypp.untrusted.text import visible

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

MOST_DOCUMENT_BYTES = 4 << 20
"""A listing of 1000 keys, each with the longest name and every attribute, is shorter."""
_LARGEST_PIECE = 1 << 20
_FAST_S = 0.2
_MOST_TAGS = 100_000
_LARGEST_OBJECT = 1 << 50
_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18}|\*)", re.ASCII)
_FIX = "check the server, and every proxy before it"


class WrongAnswer(StoreError):
    """The server answered something that cannot be true."""


def wrong(place: str, what: str) -> WrongAnswer:
    """Returns the error for an answer that cannot be true."""
    return WrongAnswer(Problem(place, what, _FIX))


def bound_answers(client: S3Client, redirects: bool) -> None:
    """Limits the documents that a client reads. Must be called before its first request.

    Args:
        client: The client.
        redirects: Whether boto3 looks for the bucket in another region after a redirect. Only AWS
            has regions: any other server that redirects to itself would be asked until the stack
            overflows.
    """
    endpoint: Any = client._endpoint  # type: ignore[attr-defined]  # no setting reaches its session
    endpoint.http_session = _BoundedSession(endpoint.http_session)
    if not redirects:
        client.meta.events.register_last("before-parameter-build.s3", _mark_redirected)


def _mark_redirected(context: dict[str, Any], **_others: Any) -> None:
    context.setdefault("s3_redirect", {})["redirected"] = True


class _BoundedSession:
    """botocore's HTTP session; reads all answers but the bytes of objects within a limit."""

    def __init__(self, session: Any) -> None:
        self._session = session

    def send(self, request: Any) -> Any:
        from botocore.awsrequest import AWSResponse

        streams, request.stream_output = request.stream_output, True
        answer = self._session.send(request)
        arrived()
        if streams and answer.status_code < 300:
            return answer
        short = AWSResponse(answer.url, answer.status_code, answer.headers, _Document(answer))
        _ = short.content  # now, as botocore does: a failure is then one of the request
        return short

    def close(self) -> None:
        self._session.close()


class _Document:
    """The body of an answer, read within a limit. botocore calls `stream` only."""

    def __init__(self, answer: Any) -> None:
        self._raw, self._place = answer.raw, visible(answer.url.partition("?")[0])

    def stream(self) -> Iterator[bytes]:
        from urllib3.exceptions import HTTPError

        document = bytearray()
        try:
            for piece in self._raw.stream(PIECE_BYTES):
                arrived()
                document += piece
                if len(document) > MOST_DOCUMENT_BYTES:
                    raise wrong(self._place, f"the server's answer has more than {MOST_DOCUMENT_BYTES:,} bytes")
        except HTTPError as error:
            raise ConnectionError(f"the answer was cut off: {error}") from error
        finally:
            self._raw.close()
        if b"<!DOCTYPE" in document or b"\0" in document or document.count(b"<") > _MOST_TAGS:
            raise wrong(self._place, "the server's answer is not S3's XML: it has a DOCTYPE, a NUL or countless tags")
        yield bytes(document)


def object_size(value: Any, place: str) -> int:
    """Returns the size of an object that a server reports, if it is possible."""
    if not isinstance(value, int) or not 0 <= value <= _LARGEST_OBJECT:
        raise wrong(place, f"the server says that the object has {visible(str(value)[:40])} bytes")
    return value


def seconds(value: Any, place: str) -> float:
    """Returns a time that a server reports, in seconds since 1970."""
    try:
        if isinstance(value, datetime):
            return value.timestamp()
    except (ValueError, OverflowError):
        pass
    raise wrong(place, f"the server says that the object was written at {visible(str(value)[:40])}")


def object_bytes(answer: Any, first: int, end: int | None, ranged: bool, place: str) -> bytes:
    """Reads the body of a GetObject.

    Args:
        answer: The parsed answer.
        first: First byte wanted.
        end: End of the bytes wanted; None: the object's end.
        ranged: Whether a range was asked for. A server may ignore it, and send the whole object.
        place: The object, for errors.

    Raises:
        WrongAnswer: It is of another range, or longer than it may be.
        IncompleteReadError: It is shorter than announced.
    """
    from botocore.exceptions import IncompleteReadError

    body, told, announced = answer["Body"], answer.get("ContentRange"), answer.get("ContentLength")
    try:
        size = None if announced is None else object_size(announced, place)
        if ranged and told is not None:
            wanted = most = _length_of_range(told, first, end, place)
        elif ranged and answer["ResponseMetadata"]["HTTPStatusCode"] == 206:
            raise wrong(place, "the server sent a part of the object and did not say which")
        else:  # the whole object: some servers ignore the range
            most = MOST_WHOLE_BYTES if end is None else end - first
            there = None if size is None else max(0, size - first)
            wanted = 0 if there is None else there if end is None else min(most, there)
            for _piece in _pieces(body, first):
                pass
        if end is None and wanted > MOST_WHOLE_BYTES:
            raise too_large(place, wanted)
        exact = end is None or (ranged and told is not None)
        data = b"".join(_pieces(body, most + 1 if exact else most))
        if len(data) > most:
            raise wrong(place, f"the server sent more than the {most:,} bytes that may come")
        if len(data) < wanted:
            raise IncompleteReadError(actual_bytes=len(data), expected_bytes=wanted)
        return data
    finally:
        body.close()  # a connection that is read to its end has gone back already


def _pieces(body: Any, most: int) -> Iterator[bytes]:
    """Yields the next `most` bytes of a body, or fewer. Pieces grow while they come fast."""
    size = PIECE_BYTES
    while most > 0:
        begun = time.monotonic()
        piece = body.read(min(size, most))
        if not piece:
            return
        arrived()
        most -= len(piece)
        fast = time.monotonic() - begun < _FAST_S
        size = min(2 * size, _LARGEST_PIECE) if fast else PIECE_BYTES
        yield piece


def _length_of_range(told: Any, first: int, end: int | None, place: str) -> int:
    """Returns the length of the range that a server says it sends, if it is the wanted one."""
    found = _RANGE.fullmatch(str(told).strip())
    asked = f"{first}-{'' if end is None else end - 1}"
    if found is not None:
        begin, last = int(found[1]), int(found[2])
        total = None if found[3] == "*" else int(found[3])
        ends = [one for one in (end, total) if one is not None]
        # Up to the wanted end, or that of the object, which a server need not tell.
        complete = last + 1 == min(ends) if total is not None else last + 1 <= min(ends, default=last + 1)
        if begin == first <= last and complete:
            return object_size(last + 1 - first, place)
    raise wrong(place, f"bytes {asked} were asked for, and the server sent {visible(str(told)[:60])!r}")
