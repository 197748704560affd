"""Checks what an S3 server answers: a body has the length that was asked for or announced, a
number is the size of an object."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Any

from raypp.errors import Problem
from raypp.storage.store import MOST_WHOLE_BYTES, StoreError, too_large
from raypp.untrusted.text import visible

_SKIPPED_BYTES = 1 << 20
_LARGEST_OBJECT = 1 << 50
_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18}|\*)", re.ASCII)
_FIX = "check the server, and every proxy before it"


class WrongAnswer(StoreError):
    """The server answered something that cannot be true."""


def wrong(place: str, what: str) -> WrongAnswer:
    """Returns the error for an answer that cannot be true."""
    return WrongAnswer(Problem(place, what, _FIX))


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
            while first > 0 and (skipped := body.read(min(first, _SKIPPED_BYTES))):
                first -= len(skipped)
        if end is None and wanted > MOST_WHOLE_BYTES:
            raise too_large(place, wanted)
        exact = end is None or (ranged and told is not None)
        data = bytes(body.read(most + 1 if exact else most))
        if len(data) > most:
            raise wrong(place, f"the server sent more than the {most:,} bytes that may come")
        if len(data) < wanted:
            raise IncompleteReadError(actual_bytes=len(data), expected_bytes=wanted)
        return data
    finally:
        body.close()  # a connection that is read to its end has gone back already


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
