"""Finds secrets in `resources.env`, which must never be printed or written to a store."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from raypp.spec.job import Job

HIDDEN = "(a secret, not shown)"
_NAME = re.compile(
    r"SECRET|TOKEN|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|PRIVATE|AUTH|API_?KEY|ACCESS_?KEY|_KEY$|^KEY$|_PAT$|WEBHOOK|DSN",
    re.IGNORECASE,
)
_URL_WITH_PASSWORD = re.compile(r"://[^/@\s]*:[^/@\s]+@")


def is_secret(name: str, value: str) -> bool:
    """Whether a variable looks like a secret: by its name, or as a URL with a password."""
    return bool(value) and value != HIDDEN and bool(_NAME.search(name) or _URL_WITH_PASSWORD.search(value))


def secrets_of(job: Job) -> dict[str, str]:
    """Returns the variables of `resources.env` that are secrets."""
    return {name: value for name, value in job.resources.env.items() if is_secret(name, value)}


def without_secrets(document: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a job's document with the values of secrets replaced by `HIDDEN`."""
    resources = document.get("resources")
    env = resources.get("env") if isinstance(resources, Mapping) else None
    if not isinstance(env, Mapping):
        return dict(document)
    shown = {name: HIDDEN if is_secret(str(name), str(value)) else value for name, value in env.items()}
    return {**document, "resources": {**document["resources"], "env": shown}}
