"""The base class of every section of the job file, and the paths of keys in it."""

from __future__ import annotations

import re

from pydantic import BaseModel, ConfigDict

KeyPath = tuple[str | int, ...]


class Section(BaseModel):
    """Base class of every section of the job file. Unknown keys are errors. Instances are
    immutable."""

    # defer_build: pydantic builds the validators on first use, so that `raypp --help` does not wait
    # for them.
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True, allow_inf_nan=False)


def dotted(path: KeyPath) -> str:
    """Formats a key path as `pipeline.layers_per_stage[1]`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def undotted(key: str) -> KeyPath:
    """Returns the key path of a dotted key (`a.b[1]`)."""
    parts = re.findall(r"\[(\d{1,9})\]|([^.\[\]]+)", key)
    return tuple(int(index) if index else name for index, name in parts)
