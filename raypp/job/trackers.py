"""Checks the trackers of a job: their options, and what they need of the environment."""

import difflib
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from raypp.errors import JobError, Problem
from raypp.job.job import Job
from raypp.job.secret import is_mark, is_secret
from raypp.kinds import TRACKERS, TrackerKind
from raypp.registry import is_module, load_object
from raypp.untrusted.text import visible


def check_trackers(job: Job) -> Iterator[Problem]:
    """Returns the problems of the trackers' options. Unknown kinds are reported elsewhere."""
    seen: set[str] = set()
    for key, kind, options in _known(job):
        if kind.name in seen:
            yield Problem(key, f"{kind.name} is listed twice", "remove one of the two: a run has one of each kind")
        seen.add(kind.name)
        for name, value in options.items():
            where = f"{key}.options.{name}"
            if name not in kind.settings and not kind.own:
                close = difflib.get_close_matches(name, kind.settings, n=1)
                known = ", ".join(kind.settings)
                yield Problem(where, "unknown option", f"did you mean {close[0]}?" if close else f"there are: {known}")
            elif is_secret(name, value):
                fault = "looks like a secret, and jobs are stored in clear"
                yield Problem(where, fault, f"set it in the environment: {', '.join(kind.variables) or 'of the nodes'}")
            elif name == "dir" and not Path(value).is_absolute():
                fault = f"{visible(value)} is relative, and the run may be led on another machine"
                yield Problem(where, fault, f"write an absolute path, such as {visible(Path.cwd() / value)}")


def missing_for_trackers(job: Job, environment: Mapping[str, str], *, here: bool) -> list[Problem]:
    """Returns what the job's trackers lack: a library, a key, an address, a folder. `job`: one that
    `check_spec` found right. `environment`: variables of its processes. `here`: whether its
    trackers run on this machine, with this Python: then libraries and folders must be here."""
    problems = []
    environment = {**environment, **job.resources.env}
    for key, kind, options in _known(job):
        if here and kind.library and not is_module(kind.library):
            fault = f"{kind.name} needs the library {kind.library}, which is not installed"
            problems.append(Problem(key, fault, f"pip install '{kind.install}', or remove it from the list"))
        if here and "dir" in options and not _writable(Path(options["dir"])):
            fault = f"cannot write to {visible(options['dir'])}"
            problems.append(Problem(f"{key}.options.dir", fault, "name a folder that you may write to"))
        if kind.checks:
            assert isinstance(kind.builder, str)
            check = load_object(f"{kind.builder.partition(':')[0]}:check")
            problems += [replace(one, key=f"{key}.{one.key}".rstrip(".")) for one in check(options, environment)]
    return problems


def tracker_variables(job: Job, environment: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Returns the variables for the job's trackers that are set: no secrets, and the secrets."""
    names = {name for _, kind, _ in _known(job) for name in kind.variables}
    values = {name: environment[name] for name in sorted(names) if environment.get(name)}
    secrets = {name: value for name, value in values.items() if is_secret(name, value)}
    return {name: value for name, value in values.items() if name not in secrets}, secrets


def environment_of(job: Job) -> dict[str, str]:
    """Returns `resources.env` without the places of secrets, which are in the environment."""
    return {name: value for name, value in job.resources.env.items() if not is_mark(value)}


def _writable(folder: Path) -> bool:
    while not os.path.lexists(folder) and folder != folder.parent:
        folder = folder.parent
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)


def _known(job: Job) -> Iterator[tuple[str, TrackerKind, Mapping[str, str]]]:
    for index, tracker in enumerate(job.observe.trackers):
        try:
            yield f"observe.trackers[{index}]", TRACKERS.get(tracker.kind), tracker.options
        except JobError:
            continue
