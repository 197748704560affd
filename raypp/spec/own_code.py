"""Finds the files of a user's own kinds.

They travel with the job so that every rank can import them.
"""

from __future__ import annotations

import importlib.util
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from raypp.errors import JobError
from raypp.spec.checks import named_kinds
from raypp.spec.job import Job
from raypp.untrusted.files import files_below, read_file

_INSTALLED = {Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
MOST_BYTES = 256 << 20
"""Most bytes of all files together."""
_FIX = "leave only code in the package; name large files by data.path, or install them on every node"
_SUFFIXES = (".py", ".typed", ".json")


def own_files(job: Job) -> list[tuple[str, bytes]]:
    """Returns the files of the modules that a job names as `module.path:function`.

    Each is (path below a folder of `sys.path`, content). A module in a package brings the whole
    package. Installed modules (in site-packages) bring nothing: like raypp's dependencies, they
    must be installed on every node.

    Raises:
        JobError: The files are too many or have more than `MOST_BYTES`, or one cannot be read.
    """
    words = [value for _, choice, value in named_kinds(job) if choice.is_own(value)]
    tops = {word.partition(":")[0].partition(".")[0] for word in words if ":" in word}
    files, size = [], 0
    for top in sorted(tops):
        for name, path in _files(top):
            content = read_file(path, MOST_BYTES - size, JobError, place=f"module {top}", fix=_FIX)
            size += len(content)
            files.append((name, content))
    return files


def _files(top: str) -> Iterator[tuple[str, Path]]:
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return
    if spec is None or top == "raypp":
        return
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    single = [Path(spec.origin)] if spec.origin and spec.has_location and not folders else []
    for path in [*single, *(path for folder in folders for path in sorted(map(Path, files_below(folder))))]:
        home = path.parent if path in single else next(folder.parent for folder in folders if folder in path.parents)
        kept = path.is_file() and path.suffix in _SUFFIXES and "__pycache__" not in path.parts
        if kept and not any(place in path.parents for place in _INSTALLED):
            yield path.relative_to(home).as_posix(), path
