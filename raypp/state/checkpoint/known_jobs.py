"""What a job read from a store may make this machine do: somebody else may have written it.

Its own code is imported, and local files that it names are opened, only if this user wrote a job
with the same ones on this machine, or says that its author is trusted.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raypp.errors import JobError
from raypp.job.availability import CHOICES
from raypp.job.paths import is_hub_name
from raypp.kinds import STORES
from raypp.state.checkpoint.run_files import with_run_files
from raypp.state.checkpoint.run_spec import read_spec
from raypp.storage import ObjectStore
from raypp.user_folder import raypp_home, write_private

NOT_YOURS = "(of a job that you did not write here; --trust uses it) "
"""Before a value that must not be used. With it, the value names no module and no file."""
_PATHS = {
    "data.path", "data.eval.path", "data.parts.path", "data.tokenizer", "data.chat_template", "model.from_hf",
    "model.from_run",
}  # fmt: skip
_WORDS = {("data.tokenizer", "bytes"), ("data.chat_template", "auto")}
_KINDS = {*CHOICES, "data.parts.kind"}
_IN_COMMIT = ("model.", "data.", "pipeline.", "train.")


def remember_job(document: Mapping[str, Any]) -> None:
    """Records that this user wrote a job on this machine, if the user's folder can be written."""
    with contextlib.suppress(JobError):
        write_private(_record(document), "")


def read_job(store: ObjectStore, run: str, *, trust: bool) -> dict[str, Any]:
    """Returns a run's resolved job, `guarded`. It names copies of the files that the store has.
    Raises CheckpointError: no run has this name, or its job cannot be read."""
    document = read_spec(store, run)
    return with_run_files(store, run, document, guarded(document, trust=trust))


def guarded(document: Mapping[str, Any], *, trust: bool = False) -> dict[str, Any]:
    """Returns a stored job with `NOT_YOURS` before each own kind and local path of others.
    `document`: the job, or the `job` of a COMMIT. `trust`: the user trusts its author."""
    with contextlib.suppress(OSError):
        trust = trust or _record(document).lstat().st_uid == os.geteuid()
    return dict(document if trust else _marked(document)[0])


def named_by(document: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Returns the own kinds and local paths that a job names, each with its key."""
    return _marked(document)[1]


def _marked(document: Mapping[str, Any]) -> tuple[Any, list[tuple[str, Any]]]:
    named: list[tuple[str, Any]] = []

    def mark(value: Any, key: str) -> Any:
        if value is not None and (key in _KINDS or key in _PATHS):
            if isinstance(value, str) and _is_harmless(key, value):
                return value
            named.append((key, value))
            return f"{NOT_YOURS}{value}"
        if isinstance(value, Mapping):
            return {name: mark(inner, f"{key}.{name}" if key else name) for name, inner in value.items()}
        return [mark(inner, key) for inner in value] if isinstance(value, list | tuple) else value

    return mark(document, ""), named


def _record(document: Mapping[str, Any]) -> Path:
    """Returns the file that exists if this user wrote a job that names the same, by COMMIT."""
    named = sorted(json.dumps(one) for one in named_by(document) if one[0].startswith(_IN_COMMIT))
    return raypp_home() / "jobs" / hashlib.sha256("\n".join(named).encode()).hexdigest()


def _is_harmless(key: str, value: str) -> bool:
    if key in _KINDS:
        choice = CHOICES[key.replace(".parts", "")]
        return choice.registry.is_built_in(value) or any(kind.name == value for kind in choice.others)
    scheme, is_url, _ = value.lower().partition("://")
    if is_url:
        return STORES.is_built_in(scheme) and not STORES.get(scheme).local
    return (key, value) in _WORDS or (key in ("data.path", "data.parts.path") and is_hub_name(value))
