"""Reads everything that a report shows about a run from the run's store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from raypp.api.find_run import present_status
from raypp.checkpoint.commit import Checkpoint, list_checkpoints
from raypp.checkpoint.run_spec import read_spec
from raypp.clusters.known_jobs import read_job
from raypp.clusters.known_runs import RunPlace
from raypp.errors import CheckpointError, JobError, Problem, RayppError
from raypp.observe.json_lines import TimedStep
from raypp.observe.reader import RunReader
from raypp.observe.trace import RankTrace, newest_trace
from raypp.observe.trace_analysis import Analysis, analyse, measured_links
from raypp.planning.decision import ResolvedPipeline
from raypp.planning.resolve import resolve_pipeline
from raypp.records import Event
from raypp.spec.load import parse_job
from raypp.storage import open_store


@dataclass(frozen=True)
class RunData:
    """Everything that a report shows about a run.

    Attributes:
        title: The run's name; with the store if two runs have the same name.
        status: As `raypp status --json`.
        steps: The steps that led to its state.
        events: All events, oldest first.
        evaluations: As of `RunReader.evaluations`.
        checkpoints: The committed checkpoints.
        job: The resolved job; None if it cannot be read.
        pipeline: The job's resolved pipeline; None if this raypp cannot resolve it.
        trace: The newest complete trace and its analysis; None if there is none.
        notes: What could not be read.
    """

    title: str
    url: str
    status: dict[str, Any]
    steps: Sequence[TimedStep]
    events: Sequence[Event]
    evaluations: Sequence[dict[str, Any]]
    checkpoints: Sequence[Checkpoint]
    job: dict[str, Any] | None
    pipeline: ResolvedPipeline | None
    trace: tuple[Sequence[RankTrace], Analysis] | None
    notes: Sequence[str]


def collect(place: RunPlace, reader: RunReader, *, trust: bool = False) -> RunData:
    """Reads a run; with `trust`, imports the code that its job names, whoever wrote it.

    Raises:
        JobError: It has not written anything.
        StoreError: Its store does not answer.
    """
    store, notes = open_store(place.url), []
    status = present_status(place, reader)
    steps, events = reader.steps(), reader.events()
    if not steps and not events:
        raise JobError(
            Problem(
                "RUN",
                f"{place.name} has written neither events nor steps to {place.url}",
                "report a run that has begun: `raypp list` shows the runs and their steps",
            )
        )
    if reader.damaged:
        notes.append(f"{reader.damaged} damaged lines of the records were left out")
    job, pipeline = None, None
    try:
        job = read_spec(store, place.name)
        pipeline = resolve_pipeline(parse_job(read_job(store, place.name, trust=trust)))
    except RayppError as error:
        notes.append(f"the job cannot be shown in full: {error}")
    trace = None
    try:
        if traces := newest_trace(store, place.name):
            trace = traces, analyse(traces, measured_links(list(events), traces[0].attempt))
    except CheckpointError as error:
        notes.append(f"the newest trace cannot be shown: {error}")
    return RunData(
        title=place.name,
        url=place.url,
        status=status,
        steps=steps,
        events=events,
        evaluations=reader.evaluations(),
        checkpoints=list_checkpoints(store, place.name),
        job=job,
        pipeline=pipeline,
        trace=trace,
        notes=notes,
    )
