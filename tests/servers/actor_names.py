"""What a cluster calls the actors of a run, without the digest of its store."""

from __future__ import annotations

import re


def without_digest(name: str) -> str:
    """Returns `raypp/NAME/pp0` of `raypp/NAME.0123abcd/pp0`."""
    return re.sub(r"^(raypp/[a-z0-9-]+)\.[0-9a-f]{8}", r"\1", name)
