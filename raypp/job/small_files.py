"""The small files that a job names, which travel with it: tokenizer, chat template, schedule. The
package of a run has them below `FOLDER`, its store below `NAME/files`. The job keeps its paths."""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raypp.untrusted.files import read_file

FOLDER = "raypp-files"
MOST_BYTES = 64 << 20
"""Most bytes of all small files of a job. What would exceed it does not travel."""
KEYS = (("data", "tokenizer"), ("data", "chat_template"), ("pipeline", "schedule"))
SAVED_BESIDE = (
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "vocab.json",
    "merges.txt", "vocab.txt", "tokenizer.model",
)  # fmt: skip
"""The files that transformers saves beside a tokenizer.json."""
TEMPLATES = "additional_chat_templates"
_OF_MODEL = ("generation_config.json", "config.json")


def small_files(*documents: Mapping[str, Any]) -> dict[tuple[str, Path], dict[str, bytes]]:
    """Reads the small files that resolved jobs name on this machine. Returns per key and path
    contents by `stored_name`, of the file and a tokenizer's others; none if too large."""
    found, left = dict[tuple[str, Path], dict[str, bytes]](), MOST_BYTES
    for document, (section, key) in ((document, at) for document in documents for at in KEYS):
        value = str((document.get(section) or {}).get(key))
        path, is_path = Path(value), value.endswith(".csv") if key == "schedule" else value != "bytes"
        there = is_path and os.path.isfile(path)  # noqa: PTH113 - false for no name
        if there and (f"{section}.{key}", path) not in found:
            paths = [path, *(_beside(path.parent) if key == "tokenizer" else ())]
            size = sum(one.stat().st_size for one in paths)
            read = paths if size <= left else []
            found[f"{section}.{key}", path] = {stored_name(path, one): read_file(one, MOST_BYTES) for one in read}
            left -= size if read else 0
    return found


def contents(*documents: Mapping[str, Any]) -> dict[str, bytes]:
    """Returns the small files of resolved jobs that travel, by `stored_name`."""
    return {name: content for files in small_files(*documents).values() for name, content in files.items()}


def stored_name(path: Path, beside: Path | None = None) -> str:
    """Returns the name under which a file travels, or one beside it or below its folder."""
    folder = hashlib.sha256(str(path.parent).encode(errors="backslashreplace")).hexdigest()[:16]
    return f"{folder}/{(beside or path).relative_to(path.parent).as_posix()}"


def here(path: Path) -> Path:
    """Returns where a run's process has a file that its job names: in its package, else there."""
    packed = Path(__file__).resolve().parents[2] / FOLDER / stored_name(path)
    return packed if os.path.isfile(packed) else path  # noqa: PTH113 - false for no name


def _beside(folder: Path) -> list[Path]:
    names = [folder / name for name in (*SAVED_BESIDE, *_OF_MODEL)]
    return [path for path in (*names, *sorted((folder / TEMPLATES).glob("*.jinja"))) if path.is_file()]
