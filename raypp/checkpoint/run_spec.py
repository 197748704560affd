"""A run's resolved job in the store. It is created only once, so that no two runs share a name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from typing_extensions import TypedDict

from raypp.checkpoint.layout import check_run, spec_key, spec_number
from raypp.errors import CheckpointError, Problem
from raypp.spec.secret import without_secrets
from raypp.storage import AlreadyExists, NotFound, ObjectStore
from raypp.untrusted.documents import Bounds, parse_as

_BOUNDS = Bounds()
_Section = dict[str, Any] | None


class _Spec(TypedDict, total=False):
    """The sections that are read without parsing the whole job, which an older raypp may have
    written."""

    model: _Section
    data: _Section
    mesh: _Section
    pipeline: _Section
    train: _Section
    checkpoint: _Section


def write_spec(store: ObjectStore, run: str, job_doc: Mapping[str, Any], number: int = 1) -> str:
    """Begins a submission: creates `NAME/spec.json`, for a resume `NAME/spec-2.json` and so on,
    without the secrets in `resources.env`.

    Args:
        number: 1 for a new run; for a resume `newest_number` + 1.

    Returns:
        The key written.

    Raises:
        AlreadyExists: A run of this name, or a resume of this number, exists; the fix names the
            alternatives.
    """
    key = spec_key(check_run(run), number)
    try:
        store.put(key, _encoded(without_secrets(job_doc)), if_absent=True)
    except AlreadyExists:
        raise AlreadyExists(name_taken(store, run) if number == 1 else _resumed_already(store, run)) from None
    return key


def name_taken(store: ObjectStore, run: str) -> Problem:
    """Returns the problem that a run of this name exists."""
    what = f"a run named {run!r} already exists at {store.url}"
    return Problem("name", what, "resume it (`raypp submit --resume`), or choose another name (`--set name=…`)")


def _resumed_already(store: ObjectStore, run: str) -> Problem:
    what = f"the run {run!r} at {store.url} was resumed by somebody else at the same time"
    return Problem("name", what, f"follow it with `raypp status {store.url.rstrip('/')}/{run} --watch`")


def newest_number(store: ObjectStore, run: str) -> int:
    """Returns the number of the last submission's spec; 0 if there is none."""
    return max(_numbers(store, check_run(run)), default=0)


def read_spec(store: ObjectStore, run: str, number: int | None = None) -> dict[str, Any]:
    """Reads a run's resolved job: that of the last resume, or the one with this number.

    Raises:
        CheckpointError: No run has this name, or its job cannot be read.
    """
    if number is None:
        number = newest_number(store, run)
    key = spec_key(run, max(number, 1))
    try:
        data = store.get(key, 0, _BOUNDS.size + 1)
    except NotFound:
        raise CheckpointError(
            Problem(f"{store.url}/{key}", f"there is no run {run!r} here", "check the URL and the name")
        ) from None
    place = f"{store.url}/{key}"
    fix = "check whether another program wrote it"
    return dict(parse_as(_Spec, data, place, _BOUNDS, fix=fix, kind="a valid job", unknown="allow"))


def _numbers(store: ObjectStore, run: str) -> list[int]:
    found = (spec_number(run, info.key) for info in store.list(f"{run}/spec"))
    return [number for number in found if number is not None]


def _encoded(job_doc: Mapping[str, Any]) -> bytes:
    return json.dumps(job_doc, indent=1, sort_keys=True).encode()
