"""The private file that carries a submitter's store credentials to the processes of a run.

Ray shows a job's env_vars on its dashboard, so keys travel in the job's package instead. Every
process of the run calls `load_private_environment` before it opens a store.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from raypp.errors import JobError
from raypp.kinds import STORES
from raypp.untrusted.documents import Bounds, parse_as
from raypp.untrusted.files import read_file

FILE = "raypp-private.json"
SECRETS = (*(name for store in STORES for name in store.secrets), "HF_TOKEN")
"""Variables that go into the private file, never into env_vars: the credentials of every kind of
store."""
SETTINGS = (
    *(name for store in STORES for name in store.settings),
    "RAYPP_STORE_PATIENCE_S",
    "RAYPP_STORE_TIMEOUT_S",
    "HF_HUB_OFFLINE",
    "HF_HOME",
)
"""Variables without secrets; they are passed on as env_vars."""

PROFILE = tuple(name for store in STORES for name in store.files)
"""Variables that name files of the submitter's machine; they are passed on when the ranks run on
that machine."""

_BOUNDS = Bounds(size=1 << 20)
_SHORTEST = 6
"""Values shorter than this are not masked: they occur in ordinary words."""
_values: set[str] = set()


def load_private_environment(directory: Path | None = None) -> None:
    """Sets the file's variables in this process' environment, when the job's package holds the
    file.

    The submitter's variables replace those that the process has already (a node's own role or
    keys).
    """
    path = (directory or Path.cwd()) / FILE
    if not path.exists():
        return
    text = read_file(path, _BOUNDS.size, JobError)
    with contextlib.suppress(OSError):
        path.chmod(0o600)
    values = parse_as(dict[str, str], text, str(path), _BOUNDS, JobError)
    os.environ.update(values)
    _values.update(value for value in values.values() if len(value) >= _SHORTEST)


def scrubbed(text: str) -> str:
    """Returns a text with the values of the private file masked, before it is written anywhere."""
    for value in _values:
        if value in text:
            text = text.replace(value, "***")
    return text


def collect(names: tuple[str, ...], source: dict[str, str]) -> dict[str, str]:
    """Returns those of the variables that are set."""
    return {name: source[name] for name in names if source.get(name)}
