"""Reads everything that a report shows about a run from the run's store."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from raypp.control.clusters.known_runs import RunPlace
from raypp.control.find_run import present_status
from raypp.control.queue.ticket import waited_s
from raypp.errors import CheckpointError, JobError, Problem, RayppError
from raypp.planning.decision import ResolvedPipeline
from raypp.records import Event
from raypp.state.checkpoint.commit import Checkpoint, list_checkpoints
from raypp.state.checkpoint.run_spec import read_pipeline, read_spec
from raypp.state.run_records.json_lines import TimedStep
from raypp.state.run_records.reader import RunReader
from raypp.state.run_records.trace import RankTrace, newest_trace
from raypp.storage import open_store
from raypp.tools.trace_analysis import Analysis, analyse, measured_links


@dataclass(frozen=True)
class RunData:
    """Everything that a report shows about a run.

    Attributes:
        title: The run's name; with the store if two runs have the same name.
        steps: The steps that led to its state.
        evaluations: As of `RunReader.evaluations`.
        job: The resolved job; None if it cannot be read.
        pipeline: That of its last attempt; None if it cannot be read.
        waited_s: For how long it has waited in line; None if it never did.
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
    waited_s: float | None
    trace: tuple[Sequence[RankTrace], Analysis] | None
    notes: Sequence[str]


def collect(place: RunPlace, reader: RunReader) -> RunData:
    """Reads a run. Raises JobError: it wrote nothing; StoreError: its store does not answer."""
    store, notes = open_store(place.url), []
    status = present_status(place, reader)
    steps, events = reader.steps(), reader.events()
    if not steps and not events:
        fix = "report a run that has begun: `raypp list` shows the runs and their steps"
        raise JobError(Problem("RUN", f"{place.name} has written neither events nor steps to {place.url}", fix))
    if reader.damaged:
        notes.append(f"{reader.damaged} damaged lines of the records were left out")
    job, pipeline = None, None
    try:
        job = read_spec(store, place.name)
        if attempt := max((event.attempt for event in events), default=0):
            pipeline = read_pipeline(store, place.name, attempt)
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
        waited_s=waited_s(store, place.name),
        trace=trace,
        notes=notes,
    )
