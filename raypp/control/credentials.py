"""The private file that carries a submitter's store credentials to the processes of its run.

Ray shows a job's env_vars on its dashboard, so keys travel in the job's package instead. Every process of the
run calls `load_private_environment` before it opens a store.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from raypp.kinds import STORES

FILE = "raypp-private.json"
SECRETS = (*(name for store in STORES for name in store.secrets), "HF_TOKEN")
"""Variables that go into the private file, never into env_vars: the credentials of every kind of store."""
SETTINGS = (
    *(name for store in STORES for name in store.settings),
    "RAYPP_STORE_PATIENCE_S",
    "RAYPP_STORE_TIMEOUT_S",
    "HF_HUB_OFFLINE",
    "HF_HOME",
)
"""Variables that anyone may see; they are passed on as env_vars."""

PROFILE = tuple(name for store in STORES for name in store.files)
"""Variables that name files of the submitter's machine; they are passed on where the ranks run on that machine."""

_SHORTEST = 6
"""Characters of a value that is looked for in texts; shorter ones are in too many words."""
_values: set[str] = set()


def load_private_environment(directory: Path | None = None) -> None:
    """Puts the file's variables into this process' environment, when the package of its job holds one.

    Variables the process has already (a node's own role or keys) are replaced: the submitter's count.
    """
    path = (directory or Path.cwd()) / FILE
    try:
        text = path.read_text()
    except FileNotFoundError:
        return
    with contextlib.suppress(OSError):
        path.chmod(0o600)
    values = {str(key): str(value) for key, value in json.loads(text).items()}
    os.environ.update(values)
    _values.update(value for value in values.values() if len(value) >= _SHORTEST)


def scrubbed(text: str) -> str:
    """A text that is about to be written down, without the values of the private file."""
    for value in _values:
        if value in text:
            text = text.replace(value, "***")
    return text


def collect(names: tuple[str, ...], source: dict[str, str]) -> dict[str, str]:
    """Those of the variables that are set."""
    return {name: source[name] for name in names if source.get(name)}
