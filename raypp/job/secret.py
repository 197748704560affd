"""Tells which values of `resources.env` may be shown; others are never printed or stored."""

import hashlib
import re
from collections.abc import Collection, Mapping
from typing import Any

from raypp.job.job import Job

_SECRET = re.compile(
    r"SECRET|TOKEN|PASS|CREDENTIAL|PRIVATE|AUTH|API_?KEY|ACCESS_?KEY|_KEY$|^KEY$|_PAT$|_?PWD?$|HOOK|DSN|NETRC"
    r"|USERPW|SSH",
    re.IGNORECASE,
)
_URL_WITH_SECRET = re.compile(
    r"://[^/@\s]*:[^/@\s]+@|://\S+\?\S*(sig|signature|token|key|credential)\S*=", re.IGNORECASE
)
_SHOWN = re.compile(
    r"(NCCL|GLOO|TORCH\w*|PYTORCH|TRITON|CUDA|CUBLAS|CUDNN|NVIDIA|OMP|KMP|MKL|OPENBLAS|NUMEXPR|MALLOC|UCX|FI|RAYPP)_\w+"
    r"|TOKENIZERS_PARALLELISM|HF_HUB_OFFLINE|HF_HOME|PYTHON\w+|LANG|LC_\w+|TZ|TMPDIR"
)
"""Variables that change how libraries compute or communicate."""
_MARK = re.compile(r"\(hidden, digest [0-9a-f]{8}\)")
"""What stands in a document for a value."""
_ROUNDS = 10_000


def is_secret(name: str, value: str) -> bool:
    """Whether a setting looks like a secret: by its name, or a URL with a password or signature."""
    return bool(value) and bool(_SECRET.search(name) or _URL_WITH_SECRET.search(value))


def is_mark(value: str) -> bool:
    """Whether a value only stands for one that is not shown."""
    return _MARK.fullmatch(value) is not None


def _is_hidden(name: str, value: str, shown: Collection[str]) -> bool:
    """Whether a variable's value may not be shown: it is on no list, or looks like a secret."""
    if not value or is_mark(value) or name in shown:
        return False
    return not _SHOWN.fullmatch(name) or (name != "TOKENIZERS_PARALLELISM" and is_secret(name, value))


def secrets_of(job: Job) -> dict[str, str]:
    """Returns the variables of `resources.env` that are not shown."""
    shown = job.resources.shown_env
    return {name: value for name, value in job.resources.env.items() if _is_hidden(name, value, shown)}


def without_secrets(document: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a job's document in which digests stand for the values that are not shown. A digest
    tells whether a later job has the same value. It belongs to the run and the variable, is slow to
    compute, and is short, so that it does not tell a password that can be guessed."""
    resources = document.get("resources")
    if not isinstance(resources, Mapping) or not isinstance(env := resources.get("env"), Mapping):
        return dict(document)
    shown, run = resources.get("shown_env") or (), document.get("name", "")
    seen = dict(env)
    for name, value in env.items():
        if _is_hidden(str(name), str(value), shown):
            digest = hashlib.pbkdf2_hmac("sha256", str(value).encode(), f"{run}/{name}".encode(), _ROUNDS, 4)
            seen[name] = f"(hidden, digest {digest.hex()})"
    return {**document, "resources": {**resources, "env": seen}}
