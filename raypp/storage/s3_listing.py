"""Reads what an S3 server answers: listings, page by page, and bodies."""

from collections.abc import Callable, Iterator
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

_SKIPPED_BYTES = 1 << 20
_PAGE_COUNTS_AS = 100
"""Objects that a page counts as, so that a listing without end in small pages takes few requests.
A page may have 1,000 objects; servers answer shorter ones where objects were deleted."""
_FIX = "check the server, and every proxy before it"

Ask = Callable[[dict[str, Any]], Any]
"""Sends the request for a page: (arguments that continue the listing) -> the parsed answer."""


def objects(ask: Ask, below: str, full: str, url: str) -> Iterator[ObjectInfo]:
    """Yields the objects of a ListObjectsV2. `ask`: sends the request for a page. `below`: prefix
    of every key of the store; it is taken off. `full`: prefix that was asked for. Raises
    WrongAnswer: the listing is without end, or is not one."""
    for key, entry in _entries(ask, "Contents", ("ContinuationToken", "NextContinuationToken"), below, full, url):
        yield object_info(key, entry.get("Size"), entry.get("LastModified"), f"{url}/{key}")


def lacks_times(page: Any) -> bool:
    """Returns whether a page has objects without a time, as rclone's in the making or deletion."""
    entries = page.get("Contents") if isinstance(page, dict) else None
    return isinstance(entries, list) and any(isinstance(one, dict) and "LastModified" not in one for one in entries)


def uploads(ask: Ask, below: str, full: str, url: str) -> Iterator[Unfinished]:
    """Yields the uploads of a ListMultipartUploads; see `objects`."""
    for key, entry in _entries(ask, "Uploads", ("KeyMarker", "NextKeyMarker"), below, full, url):
        info = object_info(key, 0, entry.get("Initiated"), f"{url}/{key}")
        yield Unfinished(key, str(entry.get("UploadId")), info.modified)


def _entries(
    ask: Ask, field: str, marker: tuple[str, str], below: str, full: str, url: str
) -> Iterator[tuple[str, Any]]:
    """Yields the entries of all pages, with their keys in the store."""
    foreign = ForeignNames(url)
    more: dict[str, Any] = {}
    count = pages = 0
    while True:
        page = ask(more)
        if "IsTruncated" not in page:
            raise wrong(url, "the server's answer is not a listing")
        for entry in page.get(field, []):
            name = str(entry.get("Key", ""))
            key = name[len(below) :]
            # Some servers ignore the prefix, or list folders as empty objects.
            if not name.startswith(full) or name.endswith("/"):
                continue
            if problem := problem_of_key(key):
                foreign.pass_over(key, problem)
            else:
                yield key, entry
        if not page["IsTruncated"]:
            return
        count, pages = count + len(page.get(field, [])), pages + 1
        if count + pages * _PAGE_COUNTS_AS > MOST_LISTED:
            raise wrong(url, f"the listing does not end: {count:,} objects in {pages:,} pages")
        before, more = more, {marker[0]: page.get(marker[1]) or ""}
        if marker[0] == "KeyMarker":
            more["UploadIdMarker"] = page.get("NextUploadIdMarker") or ""
        if more == before or not more[marker[0]]:
            raise wrong(url, "the listing does not end: it goes on where it was")


class WrongAnswer(StoreError):
    """The server answered something that cannot be true."""


def wrong(place: str, problem: str) -> WrongAnswer:
    """Returns the error for an answer that cannot be true."""
    return WrongAnswer(Problem(place, problem, _FIX))


def object_info(key: str, size: Any, modified: Any, place: str) -> ObjectInfo:
    """Returns what a server says of an object. Raises WrongAnswer: it says no size, or no time."""
    try:
        if size < 0:
            raise ValueError(size)
        return ObjectInfo(key, size, modified.timestamp())
    except (TypeError, AttributeError, ValueError, OverflowError):
        raise wrong(place, "the server does not say how large the object is, and when it was written") from None


def object_bytes(answer: Any, first: int, end: int | None, ranged: bool, place: str) -> bytes:
    """Reads the body of a GetObject. `end`: end of the bytes wanted; None: the object's end. A
    server may ignore it, and send the whole object. Raises WrongAnswer: it is of another range.
    Raises IncompleteReadError: it is shorter than announced."""
    from botocore.exceptions import IncompleteReadError

    body, sent, left = answer["Body"], answer.get("ContentRange"), answer.get("ContentLength")
    try:
        if ranged and sent is not None:
            if not str(sent).startswith(f"bytes {first}-"):
                asked = f"{first}-{'' if end is None else end - 1}"
                raise wrong(place, f"bytes {asked} were asked for, and the server sent {visible(repr(sent)[:60])}")
            skip = 0
        else:
            skip = first
        most = MOST_WHOLE_BYTES if end is None else end - first
        wanted = 0 if left is None else max(0, left - skip)
        if end is None and wanted > most:
            raise too_large(place, wanted)
        while skip > 0 and (skipped := body.read(min(skip, _SKIPPED_BYTES))):
            skip -= len(skipped)
        data = bytes(body.read(most))
        if len(data) < min(wanted, most):
            raise IncompleteReadError(actual_bytes=len(data), expected_bytes=min(wanted, most))
        return data
    finally:
        body.close()  # a connection that is read to its end has gone back already
