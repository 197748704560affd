"""Reads what an S3 server answers: listings, page by page, as long as they make progress; bodies
of the length that was asked for or announced; numbers that can be sizes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

from raypp.errors import Problem
from raypp.storage.store import (
    MOST_LISTED,
    MOST_WHOLE_BYTES,
    ForeignNames,
    ObjectInfo,
    StoreError,
    Unfinished,
    problem_of_key,
    too_large,
)
from raypp.untrusted.text import visible

_EMPTY_PAGES = 100
_KEYS_OF_A_PAGE = 10
_SKIPPED_BYTES = 1 << 20
_LARGEST_OBJECT = 1 << 50
_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18}|\*)", re.ASCII)
_FIX = "check the server, and every proxy before it"

Ask = Callable[[dict[str, Any]], Any]
"""Sends the request for a page: (arguments that continue the listing) -> the parsed answer."""


def objects(ask: Ask, below: str, full: str, url: str) -> Iterator[ObjectInfo]:
    """Yields the objects of a ListObjectsV2.

    Args:
        ask: Sends the request for a page.
        below: Prefix of every key of the store; it is taken off.
        full: Prefix that was asked for.
        url: The store, for errors.

    Raises:
        WrongAnswer: The listing does not move on, is without end, or is not one.
    """
    for key, entry in _entries(ask, "Contents", ("ContinuationToken", "NextContinuationToken"), below, full, url):
        place = f"{url}/{key}"
        yield ObjectInfo(key, object_size(entry.get("Size"), place), seconds(entry.get("LastModified"), place))


def lacks_times(page: Any) -> bool:
    """Returns whether a page has objects without a time. rclone lists those without it that are
    being written or deleted at that moment."""
    entries = page.get("Contents") if isinstance(page, dict) else None
    return isinstance(entries, list) and any(isinstance(one, dict) and "LastModified" not in one for one in entries)


def uploads(ask: Ask, below: str, full: str, url: str) -> Iterator[Unfinished]:
    """Yields the uploads of a ListMultipartUploads; see `objects`."""
    for key, entry in _entries(ask, "Uploads", ("KeyMarker", "NextKeyMarker"), below, full, url):
        yield Unfinished(key, _text(entry, "UploadId", url), seconds(entry.get("Initiated"), f"{url}/{key}"))


def _entries(
    ask: Ask, field: str, marker: tuple[str, str], below: str, full: str, url: str
) -> Iterator[tuple[str, Any]]:
    """Yields the entries of all pages, with their keys in the store."""
    foreign = ForeignNames(url)
    more: dict[str, Any] = {}
    seen: set[tuple[Any, ...]] = set()
    count = 0
    while True:
        page = ask(more)
        if "IsTruncated" not in page:
            raise wrong(url, "the server's answer is not a listing")
        entries = page.get(field, [])
        for entry in entries:
            name = _text(entry, "Key", url)
            key = name[len(below) :]
            if not name.startswith(full):
                if field == "Uploads":
                    continue  # some servers ignore the prefix
                raise wrong(url, f"the server lists {visible(repr(name[:100]))}, which is not below {full!r}")
            if name.endswith("/"):
                continue  # some servers list folders as empty objects
            if problem := problem_of_key(key):
                foreign.pass_over(key, problem)
            else:
                yield key, entry
        count += len(entries)
        if not page["IsTruncated"]:
            return
        more = {marker[0]: page.get(marker[1])}
        if marker[0] == "KeyMarker":
            more["UploadIdMarker"] = page.get("NextUploadIdMarker") or ""
        token = tuple(more.values())
        if not token[0] or token in seen:
            raise wrong(url, f"the listing does not move on: after {count:,} objects the server continues it where "
                        "it was before")  # fmt: skip
        seen.add(token)
        if count > MOST_LISTED or len(seen) > _EMPTY_PAGES + count / _KEYS_OF_A_PAGE:
            raise wrong(url, f"the listing does not end: {count:,} objects on {len(seen):,} pages")


def _text(entry: Any, field: str, url: str) -> str:
    value = entry.get(field)
    if not isinstance(value, str):
        raise wrong(url, f"the server lists an entry without {field}")
    return value


class WrongAnswer(StoreError):
    """The server answered something that cannot be true."""


def wrong(place: str, problem: str) -> WrongAnswer:
    """Returns the error for an answer that cannot be true."""
    return WrongAnswer(Problem(place, problem, _FIX))


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

    body, content_range, announced = answer["Body"], answer.get("ContentRange"), answer.get("ContentLength")
    try:
        size = None if announced is None else object_size(announced, place)
        if ranged and content_range is not None:
            wanted = most = _length_of_range(content_range, first, end, place)
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
        exact = end is None or (ranged and content_range is not None)
        data = bytes(body.read(most + 1 if exact else most))
        if len(data) > most:
            raise wrong(place, f"the server sent more than the {most:,} bytes that may come")
        if len(data) < wanted:
            raise IncompleteReadError(actual_bytes=len(data), expected_bytes=wanted)
        return data
    finally:
        body.close()  # a connection that is read to its end has gone back already


def _length_of_range(content_range: Any, first: int, end: int | None, place: str) -> int:
    """Returns the length of the range that a server says it sends, if it is the wanted one."""
    match = _RANGE.fullmatch(str(content_range).strip())
    asked = f"{first}-{'' if end is None else end - 1}"
    if match is not None:
        begin, last = int(match[1]), int(match[2])
        total = None if match[3] == "*" else int(match[3])
        ends = [one for one in (end, total) if one is not None]
        # Up to the wanted end, or that of the object, which a server need not tell.
        complete = last + 1 == min(ends) if total is not None else last + 1 <= min(ends, default=last + 1)
        if begin == first <= last and complete:
            return object_size(last + 1 - first, place)
    raise wrong(place, f"bytes {asked} were asked for, and the server sent {visible(str(content_range)[:60])!r}")
