"""Object stores: a directory or an S3 bucket behind one small Protocol."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, cast

from raypp.errors import JobError, Problem
from raypp.kinds import store_forms, store_kind
from raypp.storage.store import (
    AccessRefused,
    AlreadyExists,
    BucketMissing,
    NotFound,
    ObjectInfo,
    ObjectStore,
    Patience,
    ServerNotThere,
    StoreError,
    Unfinished,
)

__all__ = [
    "AccessRefused",
    "AlreadyExists",
    "BucketMissing",
    "NotFound",
    "ObjectInfo",
    "ObjectStore",
    "ServerNotThere",
    "StoreError",
    "Unfinished",
    "open_for_others",
    "open_store",
]


MissingBucket = Literal["error", "create"]

_SLIP = re.compile(r"^(?P<scheme>[a-zA-Z][a-zA-Z0-9+.-]*):/(?P<rest>[^/].*)?$")


def open_store(url: str, *, missing_bucket: MissingBucket = "error", patience: Patience | None = None) -> ObjectStore:
    """Opens the store at a URL: `s3://bucket/prefix`, `file:///directory`, or a plain directory.

    Sends no request to the store, except with `missing_bucket="create"`; `probe` checks it.

    Args:
        url: The URL. `~` stands for the home directory; a relative directory starts at the working
            directory.
        missing_bucket: "create" creates the bucket if it does not exist. Only for stores that raypp
            itself started, or if the user asked for it: no bucket is created silently.
        patience: How long temporary failures are retried; None for a default that suits commands.

    Raises:
        JobError: The URL is invalid.
    """
    key = "checkpoint.url"
    if not url.strip():
        raise JobError(Problem(key, "is empty", f"use {store_forms()}"))
    slip = _SLIP.match(url)
    if slip is not None:
        fix = f"did you mean {slip['scheme'].lower()}://{slip['rest'] or ''}?"
        raise JobError(Problem(key, f"{url!r} is not a URL", fix))
    kind = store_kind(url, key=key)
    if kind.name == "file" and "://" in url and not url.lower().startswith("file:"):
        raise JobError(Problem(key, f"{url!r} is not a URL", f"use {store_forms()}"))
    return cast(ObjectStore, kind.build()(url, missing_bucket=missing_bucket, patience=patience))


@contextmanager
def open_for_others(url: str) -> Iterator[ObjectStore]:
    """Opens a store to write files that others read, such as exported models and token shards. In a
    directory they have the modes that the umask leaves, and no folder of temporary files stays.
    Other stores are opened as by `open_store`."""
    from raypp.storage.directory import DirectoryStore

    store = open_store(url)
    if isinstance(store, DirectoryStore):
        store.public = True
    try:
        yield store
    finally:
        if isinstance(store, DirectoryStore):
            store.remove_temporary()
