"""Reads a line of JSON lines, within limits."""

from __future__ import annotations

import json
from typing import Any

from raypp.data.conversations import RowFault
from raypp.untrusted.text import visible

_LONG = 1 << 20
_MOST_VALUES = 8_000_000
"""Values of a line, and commas and brackets in its texts."""


def parse_object(line: str) -> dict[str, Any]:
    """Returns the object of a line.

    Raises:
        RowFault: It is not a JSON object, or has too many values.
    """
    if len(line) > _LONG and (values := sum(map(line.count, ",[{"))) > _MOST_VALUES:
        raise RowFault(f"has about {values:,} values; at most {_MOST_VALUES:,} are read", "keep only the text")
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RowFault(f"is not JSON: {visible(error)}", "repair or remove the line") from error
    if not isinstance(entry, dict):
        raise RowFault("is not a JSON object", "each line must be {…} with a text")
    return entry
