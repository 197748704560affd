"""A real S3 server for tests: SeaweedFS on free loopback ports, ended with the tests."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from raypp.control.clusters.seaweed import SeaweedServer

BUCKET = "raypp-tests"


@contextmanager
def seaweed(directory: Path | None = None) -> Iterator[SeaweedServer]:
    """Runs a server with the bucket `raypp-tests`. Without a directory its data goes on exit."""
    with tempfile.TemporaryDirectory(prefix="raypp-seaweed-") as temporary:
        server = SeaweedServer.start(directory or temporary, buckets=(BUCKET,))
        try:
            yield server
        finally:
            server.stop(grace_s=0.2)
