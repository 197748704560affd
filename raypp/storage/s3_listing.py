"""Reads listings of a bucket, page by page, as long as they make progress."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from raypp.storage.s3_answers import object_size, seconds, wrong
from raypp.storage.store import MOST_LISTED, ForeignNames, ObjectInfo, Unfinished, problem_of_key
from raypp.storage.store_retry import Budget
from raypp.untrusted.text import visible

_EMPTY_PAGES = 100
_KEYS_OF_A_PAGE = 10
_LISTING_TIMES = 4

Ask = Callable[[dict[str, Any]], Any]
"""Sends the request for a page: (arguments that continue the listing) -> the parsed answer."""


def objects(ask: Ask, below: str, full: str, url: str, budget: Budget | None) -> Iterator[ObjectInfo]:
    """Yields the objects of a ListObjectsV2.

    Args:
        ask: Sends the request for a page.
        below: Prefix of every key of the store; it is taken off.
        full: Prefix that was asked for.
        url: The store, for errors.
        budget: Bounds the time of a command's requests; None in training.

    Raises:
        WrongAnswer: The listing does not move on, is without end, or is not one.
    """
    foreign = ForeignNames(url)
    for entry in _entries(ask, "Contents", ("ContinuationToken", "NextContinuationToken"), url, budget):
        name = _text(entry, "Key", url)
        _check_prefix(name, full, url)
        if name.endswith("/"):
            continue  # some servers list folders as empty objects
        key = name[len(below) :]
        problem = problem_of_key(key)
        if problem:
            foreign.pass_over(key, problem)
            continue
        place = f"{url}/{key}"
        yield ObjectInfo(key, object_size(entry.get("Size"), place), seconds(entry.get("LastModified"), place))


def lacks_times(page: Any) -> bool:
    """Returns whether a page has objects without a time. rclone lists those without it that are
    being written or deleted at that moment."""
    entries = page.get("Contents") if isinstance(page, dict) else None
    return isinstance(entries, list) and any(isinstance(one, dict) and "LastModified" not in one for one in entries)


def uploads(ask: Ask, below: str, full: str, url: str, budget: Budget | None) -> Iterator[Unfinished]:
    """Yields the uploads of a ListMultipartUploads; see `objects`."""
    foreign = ForeignNames(url)
    for entry in _entries(ask, "Uploads", ("KeyMarker", "NextKeyMarker"), url, budget):
        name = _text(entry, "Key", url)
        if not name.startswith(full):
            continue  # some servers ignore the prefix
        key = name[len(below) :]
        problem = problem_of_key(key)
        if problem:
            foreign.pass_over(key, problem)
            continue
        yield Unfinished(key, _text(entry, "UploadId", url), seconds(entry.get("Initiated"), f"{url}/{key}"))


def _entries(ask: Ask, field: str, marker: tuple[str, str], url: str, budget: Budget | None) -> Iterator[Any]:
    """Yields the entries of all pages."""
    more: dict[str, Any] = {}
    seen: set[tuple[Any, ...]] = set()
    count = 0
    spent = 0.0
    while True:
        begun = time.monotonic()
        page = ask(more)
        spent += time.monotonic() - begun
        if "IsTruncated" not in page:
            raise wrong(url, "the server's answer is not a listing")
        entries = page.get(field, [])
        yield from entries
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
        if budget is not None and spent > _LISTING_TIMES * budget.total_s:
            raise wrong(
                url,
                f"the listing did not end in {spent:.0f} s: {count:,} objects on {len(seen):,} pages; "
                "RAYPP_STORE_PATIENCE_S allows more",
            )


def _text(entry: Any, field: str, url: str) -> str:
    value = entry.get(field)
    if not isinstance(value, str):
        raise wrong(url, f"the server lists an entry without {field}")
    return value


def _check_prefix(name: str, full: str, url: str) -> None:
    if not name.startswith(full):
        raise wrong(url, f"the server lists {visible(repr(name[:100]))}, which is not below {full!r}")
