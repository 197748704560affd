"""What only one process of tests may do at a time."""

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Waits until no other process of this user, of any worker of any tier, is in this context. A
    Ray node chooses its ports some seconds before it listens on them."""
    with Path(tempfile.gettempdir(), f"raypp-tests-{os.getuid()}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
