"""Checks the parts of `data.kind: mixture` with each other."""

from __future__ import annotations

from collections.abc import Iterator

from raypp.errors import JobError, Problem
from raypp.kinds import SOURCES, SourceKind
from raypp.spec.job import Job

_MOST_PARTS = 1000


def check_mixture(job: Job) -> Iterator[Problem]:
    """Returns the problems of the parts with each other. Reads no file.

    Whether their budgets suffice is only known when the data is read (`raypp.data.mixture`).
    """
    data, parts = job.data, job.data.parts
    example = "for example `parts: [{weight: 2, kind: text, path: a.txt}, {weight: 1, kind: text, path: b.txt}]`"
    if not parts:
        yield Problem("data.parts", "is empty" if parts is not None else "is missing: a mixture has parts", example)
        return
    if len(parts) > _MOST_PARTS:
        fault = f"has {len(parts):,} parts; at most {_MOST_PARTS:,} are mixed"
        yield Problem("data.parts", fault, "join files of the same kind by a glob or a directory")
    if data.path is not None:
        yield Problem("data.path", "a mixture has no path of its own", "give each of data.parts its path")
    for name in ("columns", "roles"):
        if getattr(data, name):
            yield Problem(f"data.{name}", "a mixture has none of its own", f"give each of data.parts its {name}")
    if data.eval is not None and data.eval.path is not None:
        fault = "a mixture holds out a fraction of each of its parts"
        yield Problem("data.eval.path", fault, "use `eval: {fraction: 0.02}`")
    names = [part.name for part in parts if part.name is not None]
    for index, part in enumerate(parts):
        key = f"data.parts[{index}]"
        source = known_source(part.kind)
        if source is not None and source.mixes:
            fault = "a mixture cannot be a part of a mixture"
            yield Problem(f"{key}.kind", fault, "list its parts here, with their weights multiplied by its weight")
        if part.epochs is not None and part.tokens is not None:
            yield Problem(f"{key}.tokens", "epochs are given, too", "leave out one of the two")
        if part.name is not None and names.count(part.name) > 1:
            yield Problem(f"{key}.name", f"another part is named {part.name!r}, too", "give each its own name")


def known_source(name: str) -> SourceKind | None:
    """Returns a data source; None if the name is unknown, which is reported elsewhere."""
    try:
        return SOURCES.get(name)
    except JobError:
        return None


def rows_of_run(job: Job) -> tuple[int, int]:
    """Returns the rows of one step, of all replicas, and those of the whole run."""
    return job.rows_per_step, job.rows_per_step * job.train.steps


def spent_problem(job: Job, rows: int) -> Problem:
    """Returns the problem of parts whose budgets together give only `rows` rows."""
    per_step, needed = rows_of_run(job)
    full = rows // per_step
    fault = (
        f"the budgets of all parts are spent in step {full + 1:,} of {job.train.steps:,}: "
        f"they give {rows:,} rows, and the run takes {needed:,}"
    )
    fewer = f", or set train.steps to {full:,}" if full else ""
    return Problem("data.parts", fault, f"raise a budget, or leave one part without any{fewer}")
