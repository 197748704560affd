"""The job file's keys that name kinds, the names each accepts, and files of a user's own kinds."""

import importlib.util
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

from raypp.errors import JobError
from raypp.job.job import Job
from raypp.job.known_families import MODELS
from raypp.kinds import OPTIMIZERS, POLICIES, SCHEDULES, SOURCES, TRACKERS
from raypp.registry import Kind, Registry
from raypp.untrusted.files import files_below, read_file

MOST_BYTES = 256 << 20
"""Most bytes of all files of a user's own kinds."""
_INSTALLED = {Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
_FIX = "leave only code in the package; name large files by data.path, or install them on every node"
_SUFFIXES = (".py", ".typed")
_LIST = "travels.txt"
"""Names the other files of a package that travel, one a line; others may hold secrets."""
_FUNCTION = re.compile(r"^[^:]+:[^:]+$")


@dataclass(frozen=True)
class Choice:
    """The names that one key accepts. `registry`: the kinds that a name may refer to. `others`:
    further names that are not in the registry. `own`: pattern of a user's own kind."""

    registry: Registry[Any]
    others: tuple[Kind, ...] = ()
    own: re.Pattern[str] = _FUNCTION

    def kinds(self) -> list[Kind]:
        """Returns the kind of each name, in display order."""
        return [*self.registry, *self.others]

    def words(self) -> list[str]:
        return [kind.name for kind in self.kinds()]

    def available(self) -> list[str]:
        """Returns the names that work in this version."""
        return [kind.name for kind in self.kinds() if kind.available]

    def is_own(self, word: str) -> bool:
        """Whether a name has the form of a user's own kind."""
        return self.own.search(word) is not None

    def works(self, word: str) -> bool:
        """Whether this version accepts a name. Does not check that own kinds can be imported."""
        if any(kind.name == word for kind in self.others):
            return True
        return bool(self.registry.get(word).available) if word in self.registry else self.is_own(word)


_AUTO = Kind("auto", "chosen from the numbers of stages per rank and microbatches; mostly 1f1b")

CHOICES: dict[str, Choice] = {
    "model.kind": Choice(MODELS),
    "data.kind": Choice(SOURCES),
    "pipeline.schedule": Choice(SCHEDULES, (_AUTO,), re.compile(r"^[^:]+:[^:]+$|\.csv$")),
    "train.optimizer.kind": Choice(OPTIMIZERS),
    "recovery.policy": Choice(POLICIES),
    "observe.trackers.kind": Choice(TRACKERS),
}
"""Every key of the job file that names a kind."""


def named_kinds(job: Job) -> Iterator[tuple[str, Choice, str]]:
    """Yields every key of a job that names a kind, what it accepts, and its value."""
    for key, choice in CHOICES.items():
        if key == "observe.trackers.kind":
            for index, tracker in enumerate(job.observe.trackers):
                yield f"observe.trackers[{index}].kind", choice, tracker.kind
        else:
            yield key, choice, value_at(job, key)
    for index, part in enumerate(job.data.parts or ()):
        yield f"data.parts[{index}].kind", CHOICES["data.kind"], part.kind


def value_at(job: Job, key: str) -> Any:
    return reduce(getattr, key.split("."), job)


def own_files(job: Job) -> list[tuple[str, bytes]]:
    """Returns the files of the modules that a job names as `module.path:function`.

    Each is (path below a folder of `sys.path`, content). A module in a package brings the whole
    package. Installed modules (in site-packages) bring nothing: every node must have them. Raises
    JobError: the files are too many or have more than `MOST_BYTES`, or one cannot be read."""
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
    lists = [folder / _LIST for folder in folders if (folder / _LIST).is_file()]
    texts = {path: read_file(path, 1 << 20, JobError, fix=_FIX).decode(errors="replace") for path in lists}
    listed = {path.parent / name.strip() for path, text in texts.items() for name in text.splitlines()}
    for path in [*single, *(path for folder in folders for path in sorted(map(Path, files_below(folder))))]:
        home = path.parent if path in single else next(folder.parent for folder in folders if folder in path.parents)
        kept = path.is_file() and "__pycache__" not in path.parts and (path.suffix in _SUFFIXES or path in listed)
        if kept and not any(place in path.parents for place in _INSTALLED):
            yield path.relative_to(home).as_posix(), path
