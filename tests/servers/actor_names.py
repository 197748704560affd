"""What a cluster calls the actors of a run, and says of one that died."""

import re

DIED_UNEXPECTEDLY = (
    "The actor died unexpectedly before finishing this task.\n\tThe actor is dead because its worker process has died. "
    "Worker exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits with a connection error code 2. "
    "End of file. There are some potential root causes. (1) The process is killed by SIGKILL by OOM killer due to high "
    "memory usage. (2) ray stop --force is called. (3) The worker is crashed unexpectedly due to SIGSEGV or other "
    "unexpected errors."
)


def without_digest(name: str) -> str:
    """Returns `raypp/NAME/pp0` of `raypp/NAME.0123abcd/pp0`."""
    return re.sub(r"^(raypp/[a-z0-9-]+)\.[0-9a-f]{8}", r"\1", name)
