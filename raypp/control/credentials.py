"""Carries a submitter's keys to the processes of a run, in the memory of the cluster's head.

Ray shows a job's env_vars on its dashboard and on command lines, and every node writes a job's
package to files. So keys are a value of Ray's key-value store, which its token guards; a variable
names it. Every process of the run calls `load_private_environment` before it opens a store, also
one that Ray or the controller starts later. The value goes with the run (`forget`).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING

from raypp.errors import Problem, UnreachableError
from raypp.kinds import STORES
from raypp.untrusted.documents import Bounds, parse_as

if TYPE_CHECKING:
    from raypp.control.clusters.dashboard import Dashboard

_PLACE = "RAYPP_PRIVATE"
"""Names the value in Ray's key-value store."""
SECRETS = (*(name for store in STORES for name in store.secrets), "HF_TOKEN")
"""Variables that never go into env_vars: the credentials of every kind of
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
_ORDINARY = re.compile(r"[A-Za-z]+|[\d.]+|[\w.-]*(/[\w.-]+)+/?")
"""Shorter values, and such words, numbers and paths, are not masked: they occur in other texts."""
_values: set[str] = set()


def deposit(dashboard: Dashboard, values: Mapping[str, str]) -> dict[str, str]:
    """Leaves variables with a cluster; returns the variable for the job that may read them."""
    if not values:
        return {}
    return {_PLACE: dashboard.put_package(f"_ray_pkg_{secrets.token_hex(16)}.zip", json.dumps(values).encode())}


def load_private_environment() -> None:
    """Sets the variables that were left for this job in this process' environment. They replace
    those that the process has already (a node's own role or keys). This process is connected to
    Ray. Raises UnreachableError: the cluster has them no longer."""
    place = os.environ.get(_PLACE)
    if place is None:
        return
    from ray.experimental.internal_kv import _internal_kv_get

    text = _internal_kv_get(place)
    if text is None:
        fix = "submit it again; a run with `raypp submit JOB --resume`"
        raise UnreachableError(Problem("", "the cluster no longer has the keys of this job", fix))
    take(parse_as(dict[str, str], text, "the keys of this job", _BOUNDS, UnreachableError))


def take(values: Mapping[str, str]) -> None:
    """Sets private variables in this process' environment, and masks their values from now on."""
    os.environ.update(values)
    _values.update(one for one in values.values() if len(one) >= _SHORTEST and not _ORDINARY.fullmatch(one))


def forget() -> None:
    """Removes the variables from the cluster: the job is over."""
    if place := os.environ.get(_PLACE):
        from ray.experimental.internal_kv import _internal_kv_del

        with contextlib.suppress(Exception):  # the head may be gone
            _internal_kv_del(place)


def scrubbed(text: str) -> str:
    """Returns a text with the private values masked, before it is written anywhere."""
    for value in _values:
        if value in text:
            text = text.replace(value, "***")
    return text


def collect(names: tuple[str, ...], source: dict[str, str]) -> dict[str, str]:
    """Returns those of the variables that are set."""
    return {name: source[name] for name in names if source.get(name)}
