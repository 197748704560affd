"""What travels with a job besides raypp's code: the user's own code, and small files, which the
store has, too, for whoever uses the run on another machine."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from raypp.checkpoint.run_spec import read_spec
from raypp.errors import Problem, size_text
from raypp.kinds import known_source
from raypp.spec.availability import own_files
from raypp.spec.job import Job
from raypp.spec.load import job_document
from raypp.spec.small_files import KEYS, MOST_BYTES, small_files, stored_name
from raypp.storage import ObjectStore
from raypp.untrusted.text import visible

_NAME = re.compile(r"[0-9a-f]{16}/(?:additional_chat_templates/)?[^/\0]{1,255}")


def travelling_files(job: Job, store: ObjectStore, resume: bool, say: Callable[[str], None]) -> dict[str, bytes]:
    """Returns the small files of a job, by `stored_name`, and digests of the user's own code. Says
    what travels, what is too large, and what has changed since the submission that is resumed."""
    code = {f"your code {name}": content for name, content in own_files(job)}
    small = small_files(job_document(job))
    groups = {f"{key} {visible(path)}": files for (key, path), files in small.items()}
    sizes = {words: sum(map(len, files.values())) for words, files in groups.items() if files}
    if travel := sizes | {words: len(content) for words, content in code.items()}:
        say(f"with the job travel: {'; '.join(f'{words} ({size_text(size)})' for words, size in travel.items())}")
    for words in groups.keys() - sizes.keys():
        most = f"with what travels already, more than {MOST_BYTES >> 20} MiB"
        say(f"note: {words} does not travel ({most}): every node must have it")
    for words, content in code.items():
        digest = hashlib.sha256(content).hexdigest()
        groups[words] = {stored_name(Path(words)): digest.encode()}
    earlier, before = _submitted(store, job.name) if resume else ({}, {})
    was = {f"{key} {visible(path)}": _of_path(before, earlier.get(key), path) for key, path in small}
    for words, files in groups.items():
        there = was.get(words, before)
        if any(there.get(name, content) != content for name, content in files.items()):
            say(f"note: {words} has changed since the run was submitted: it resumes with the new content")
    return {name: content for files in groups.values() for name, content in files.items()}


def changed_files(store: ObjectStore, run: str, job: Job) -> list[Problem]:
    """Returns a problem for a tokenizer or a chat template that is not the one that a run with
    checkpoints was submitted with, wherever its file is now."""
    (earlier, before), problems = _submitted(store, run), []
    for (key, path), files in small_files(job_document(job)).items():
        name, source = stored_name(path), known_source(job.data.kind)
        was, now = _of_path(before, earlier.get(key), path).get(name), files.get(name)
        told_by_content = path.suffix == (".json" if key == "data.tokenizer" else ".jinja") and key.startswith("data.")
        if None in (was, now) or was == now or not told_by_content or (source is not None and source.ids == "model"):
            continue
        old, new = (
            f"{len(one)} bytes, digest {hashlib.sha256(one).hexdigest()[:16]}" for one in (was or b"", now or b"")
        )
        kept = f"{store.url}/{run}/files/{stored_name(Path(str(earlier[key])))}"
        fault = f"{visible(path)} ({new}) is not what the run began with, {visible(earlier[key])} ({old})"
        problems.append(
            Problem(key, fault, f"use that file, of which {kept} is a copy, or start a run under another name")
        )
    return problems


def _submitted(store: ObjectStore, run: str) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Returns the paths that the last submission of a run named, by key, and its files."""
    document = read_spec(store, run)
    return {f"{section}.{key}": (document.get(section) or {}).get(key) for section, key in KEYS}, read_run_files(
        store, run
    )


def _of_path(files: Mapping[str, bytes], before: Any, now: Path) -> dict[str, bytes]:
    """Returns the files that were submitted with a path, by their names with another."""
    if not isinstance(before, str):
        return {}
    (folder, _, main), (new, _, renamed) = (stored_name(path).partition("/") for path in (Path(before), now))
    mine = {name.partition("/")[2]: content for name, content in files.items() if name.startswith(f"{folder}/")}
    return {f"{new}/{renamed if name == main else name}": content for name, content in mine.items()}


def write_run_files(store: ObjectStore, run: str, files: Mapping[str, bytes]) -> None:
    """Stores the files of a submission, in place of those of the submission before."""
    there = read_run_files(store, run)
    store.delete([f"{run}/files/{name}" for name in there.keys() - files.keys()])
    for name, content in files.items():
        if there.get(name) != content:
            store.put(f"{run}/files/{name}", content)


def read_run_files(store: ObjectStore, run: str) -> dict[str, bytes]:
    """Returns the files of a run's last submission, by the name that `stored_name` gives them."""
    prefix, found, left = f"{run}/files/", dict[str, bytes](), MOST_BYTES + (1 << 20)
    for info in store.list(prefix):
        name = info.key.removeprefix(prefix)
        if _NAME.fullmatch(name) and not name.endswith(("/.", "/..")) and info.size <= left:
            found[name] = store.get(info.key, 0, info.size)
            left -= info.size + 1024
    return found


def with_run_files(
    store: ObjectStore, run: str, document: dict[str, Any], into: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Returns a run's job, or `into`, with copies here of the files it was submitted with."""
    from raypp.data.node_cache import cache_directory, made_once  # NumPy, which the quick commands do not need

    into = into or document
    values = {(section, key): (document.get(section) or {}).get(key) for section, key in KEYS}
    names = {at: stored_name(Path(value)) for at, value in values.items() if isinstance(value, str) and "/" in value}
    files = read_run_files(store, run) if names else {}
    digest = hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()[:32]

    def fill(folder: Path) -> None:
        for name, content in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)

    for (section, key), name in names.items():
        if name in files:
            copy = made_once(cache_directory() / "files" / digest, fill) / name
            into = into | {section: into[section] | {key: str(copy)}}
    return into
