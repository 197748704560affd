"""A real S3 server for tests: one SeaweedFS on free loopback ports, gone when the tests are."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from raypp.clusters.seaweed import SeaweedServer

BUCKET = "raypp-tests"


@contextmanager
def seaweed(directory: Path | None = None) -> Iterator[SeaweedServer]:
    """A running server with the bucket `raypp-tests`; its data are removed with it when no
    directory is given."""
    with tempfile.TemporaryDirectory(prefix="raypp-seaweed-") as temporary:
        server = SeaweedServer.start(directory or temporary, buckets=(BUCKET,))
        try:
            yield server
        finally:
            server.stop(grace_s=0.2)
