"""URL -> store."""

from __future__ import annotations

import re
from typing import Literal, cast

from raypp.errors import JobError, Problem
from raypp.kinds import store_forms, store_kind
from raypp.storage.retry import Patience
from raypp.storage.store import ObjectStore

MissingBucket = Literal["error", "create"]

_SLIP = re.compile(r"^(?P<scheme>[a-zA-Z][a-zA-Z0-9+.-]*):/(?P<rest>[^/].*)?$")


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
    key = "checkpoint.url"
    if not url.strip():
        raise JobError(Problem(key, "is empty", f"give {store_forms()}"))
    slip = _SLIP.match(url)
    if slip is not None:
        fix = f"did you mean {slip['scheme'].lower()}://{slip['rest'] or ''}?"
        raise JobError(Problem(key, f"{url!r} is not a URL", fix))
    kind = store_kind(url, key=key)
    if kind.name == "file" and "://" in url and not url.lower().startswith("file:"):
        raise JobError(Problem(key, f"{url!r} is not a URL", f"give {store_forms()}"))
    return cast(ObjectStore, kind.build()(url, missing_bucket=missing_bucket, patience=patience))
