"""What travels with a job besides raypp's code: the user's own code, and small files, which the
store has, too, for whoever uses the run on another machine."""

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from raypp.errors import JobError, Problem, size_text
from raypp.job.availability import own_files
from raypp.job.job import Job
from raypp.job.load import job_document
from raypp.job.small_files import KEYS, MOST_BYTES, small_files, stored_name
from raypp.state.checkpoint.commit import list_checkpoints
from raypp.state.checkpoint.run_spec import read_spec
from raypp.storage import ObjectStore
from raypp.untrusted.text import visible

_NAME = re.compile(r"[0-9a-f]{16}/(?:additional_chat_templates/)?[^/\0]{1,255}")


def travelling_files(job: Job, store: ObjectStore, resume: bool, say: Callable[[str], None]) -> dict[str, bytes]:
    """Returns the small files of a job, by `stored_name`, and digests of the user's own code. Says
    what travels, what is too large, and what has changed since the submission that is resumed.
    Raises JobError: the run has checkpoints, and began with another tokenizer or chat template."""
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
    before = _submitted(store, job.name, small) if resume else {}
    saved, problems = resume and bool(list_checkpoints(store, job.name)), []
    for words, files in groups.items():
        changed = [name for name, content in files.items() if before.get(name, content) != content]
        if saved and words.startswith("data.") and changed[:1] == [*files][:1] != []:
            old, new = (hashlib.sha256(one[changed[0]]).hexdigest()[:16] for one in (before, files))
            key, _, path = words.partition(" ")
            fix = f"use the file of which {store.url}/{job.name}/files has a copy, or start a run under another name"
            fault = f"{path} is another than the run began with (digest {new}, was {old})"
            problems.append(Problem(key, fault, fix))
        elif changed:
            say(f"note: {words} has changed since the run was submitted: it resumes with the new content")
    if problems:
        raise JobError(problems)
    return {name: content for files in groups.values() for name, content in files.items()}


def _submitted(store: ObjectStore, run: str, paths: Iterable[tuple[str, Path]]) -> dict[str, bytes]:
    """Returns the files of a run's last submission, by the names that the paths give them now."""
    document, files = read_spec(store, run), read_run_files(store, run)
    found = dict(files)
    for key, path in paths:
        section, _, name = key.partition(".")
        if isinstance(was := (document.get(section) or {}).get(name), str):
            (old, _, main), (now, _, renamed) = (stored_name(one).partition("/") for one in (Path(was), path))
            for below in [name.partition("/")[2] for name in files if name.startswith(f"{old}/")]:
                found[f"{now}/{renamed if below == main else below}"] = files[f"{old}/{below}"]
    return found


def write_run_files(store: ObjectStore, run: str, files: Mapping[str, bytes]) -> None:
    """Stores the files of a submission, in place of those of the submission before."""
    stored = read_run_files(store, run)
    store.delete([f"{run}/files/{name}" for name in stored.keys() - files.keys()])
    for name, content in files.items():
        if stored.get(name) != content:
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
    from raypp.storage.node_cache import cache_directory, made_once  # NumPy, which the quick commands do not need

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
