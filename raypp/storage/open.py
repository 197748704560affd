"""URL -> store. A new kind of store is one file and one `register` line here."""

from __future__ import annotations

import re
from typing import Literal, cast

from raypp.errors import JobError, Problem
from raypp.registry import Registry
from raypp.storage.retry import Patience
from raypp.storage.store import ObjectStore

MissingBucket = Literal["error", "create"]

STORES = Registry("store")
STORES.register("file", "raypp.storage.directory:open_directory", summary="a directory every rank can reach")
STORES.register(
    "s3", "raypp.storage.s3:open_s3", summary="s3://bucket/prefix, on AWS or any server with S3's interface"
)

_URL = re.compile(r"^(?P<scheme>[a-zA-Z][a-zA-Z0-9+.-]*):/+(?P<rest>.*)$")


def open_store(url: str, *, missing_bucket: MissingBucket = "error", patience: Patience | None = None) -> ObjectStore:
    """Opens the store at a URL: `s3://bucket/prefix`, `file:///directory`, or a plain directory.

    Nothing is asked of the store yet (`probe` does that), except with `missing_bucket="create"`.

    Args:
        url: Where. `~` stands for the home directory; a relative directory starts at the working directory.
        missing_bucket: "create" makes the bucket when it is not there. Only for stores raypp itself
            started, or when a person asked for it: nobody's bucket is made silently.
        patience: How long failures that may pass are met by asking again; None: what suits a command.

    Raises:
        JobError: Not such a URL.
    """
    if not url.strip():
        raise JobError(Problem("checkpoint.url", "is empty", "give s3://bucket/prefix or a directory"))
    match = _URL.match(url)
    if match is None:
        if "://" in url:
            raise JobError(Problem("checkpoint.url", f"{url!r} is not a URL", "give s3://bucket/prefix or a directory"))
        scheme = "file"
    else:
        scheme = match["scheme"].lower()
        if "://" not in url:
            raise JobError(
                Problem("checkpoint.url", f"{url!r} is not a URL", f"did you mean {scheme}://{match['rest']}?")
            )
        if scheme not in STORES:
            STORES.get(scheme.replace(":", ""), key="checkpoint.url")
    build = STORES.get(scheme, key="checkpoint.url").build()
    return cast(ObjectStore, build(url, missing_bucket=missing_bucket, patience=patience))
