"""Finds the files of a user's own kinds.

They travel with the job so that every rank can import them.
"""

from __future__ import annotations

import importlib.util
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from raypp.spec.availability import CHOICES
from raypp.spec.checks import value_at
from raypp.spec.job import Job

_INSTALLED = {Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
_SUFFIXES = (".py", ".typed", ".json")


def own_files(job: Job) -> list[tuple[str, bytes]]:
    """Returns the files of the modules that a job names as `module.path:function`.

    Each is (path below a folder of `sys.path`, content). A module in a package brings the whole
    package. Installed modules (in site-packages) bring nothing: like raypp's dependencies, they
    must be installed on every node.
    """
    words = [value_at(job, key) for key, choice in CHOICES.items() if choice.is_own(value_at(job, key))]
    tops = {word.partition(":")[0].partition(".")[0] for word in words if ":" in word}
    return [found for top in sorted(tops) for found in _files(top)]


def _files(top: str) -> Iterator[tuple[str, bytes]]:
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return
    if spec is None or top == "raypp":
        return
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    single = [Path(spec.origin)] if spec.origin and spec.has_location and not folders else []
    for path in [*single, *(path for folder in folders for path in sorted(folder.rglob("*")))]:
        home = path.parent if path in single else next(folder.parent for folder in folders if folder in path.parents)
        kept = path.is_file() and path.suffix in _SUFFIXES and "__pycache__" not in path.parts
        if kept and not any(place in path.parents for place in _INSTALLED):
            yield path.relative_to(home).as_posix(), path.read_bytes()
