"""A run's resolved job, what was decided for its attempts, and how a submission of it ended.

Job and end are created only once, so no two runs share a name, and all who ask agree on the end.
"""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from typing_extensions import TypedDict

from raypp.errors import CheckpointError, Problem, in_words
from raypp.job.load import job_document
from raypp.job.secret import without_secrets
from raypp.planning.decision import VERSION, Decision, ResolvedPipeline
from raypp.records import RunState
from raypp.state.checkpoint.layout import check_run, decision_key, end_key, spec_key, spec_number
from raypp.storage import AlreadyExists, NotFound, ObjectStore
from raypp.untrusted.documents import Bounds, Count, Time, parse_as

_T = TypeVar("_T")
_BOUNDS = Bounds()


@dataclass(frozen=True)
class RunEnd:
    """How a submission ended.

    Attributes:
        state: SUCCEEDED, FAILED or STOPPED.
        exit_code: What its commands exit with.
        step: The last finished step.
        checkpoint: URL/NAME/step-N of the newest commit; None if there is none.
        reason: Why it failed, or what else its owner should know; "" if nothing.
        attempt: The last attempt; 0 if there was none.
        time: Seconds since 1970.
    """

    run: str
    state: RunState
    exit_code: Count
    step: Count = 0
    checkpoint: str | None = None
    reason: str = ""
    attempt: Count = 0
    time: Time = field(default_factory=time.time)

    def in_status(self, status: dict[str, Any]) -> dict[str, Any]:
        """Returns the last status that was written, as it is since the end."""
        known = {"step": self.step, "checkpoint": self.checkpoint} if self.attempt else {}
        error = self.reason if self.state is RunState.FAILED else None
        ranks = [{**rank, "state": "done" if rank["state"] == "running" else rank["state"]} for rank in status["ranks"]]
        return {**status, **known, "state": str(self.state), "error": error, "ranks": ranks}


def write_end(store: ObjectStore, end: RunEnd, number: int) -> RunEnd:
    """Creates the object of the submission with this spec. Returns the end that counts: this one,
    or an earlier one. Raises CheckpointError: that cannot be read."""
    key = end_key(end.run, number)
    try:
        store.put(key, json.dumps(asdict(end), indent=1).encode(), if_absent=True)
        return end
    except AlreadyExists:
        return _read(store, key) or end


def read_end(store: ObjectStore, run: str, number: int | None = None) -> RunEnd | None:
    """Returns how a submission ended; None if it has not. `number`: of its spec; None: the newest.
    Raises CheckpointError: the object is damaged; names it."""
    return _read(store, end_key(run, newest_number(store, run) if number is None else number))


def _read(store: ObjectStore, key: str) -> RunEnd | None:
    try:
        data = store.get(key, 0, _BOUNDS.size + 1)
    except NotFound:
        return None
    fix = "check whether another program wrote it; delete it to let raypp look at the run's records only"
    url = f"{store.url}/{key}"
    return parse_as(RunEnd, data, url, _BOUNDS, CheckpointError, fix, kind="a run's end", unknown="ignore")


# A run has ended if the newest of its specs has an end. Then nothing of it runs or holds devices.

_Section = dict[str, Any] | None


class _Spec(TypedDict, total=False):
    """The sections that are read without parsing the whole job."""

    model: _Section
    data: _Section
    mesh: _Section
    pipeline: _Section
    train: _Section
    checkpoint: _Section


def write_spec(store: ObjectStore, run: str, job_doc: Mapping[str, Any], number: int = 1) -> str:
    """Begins a submission: creates `NAME/spec.json`, for a resume `NAME/spec-2.json` and so on,
    without the secrets in `resources.env`. `number`: 1 for a new run; for a resume `newest_number`
    + 1. Returns the key written. Raises AlreadyExists: a run of this name, or a resume of this
    number, exists; the fix names the alternatives."""
    key = spec_key(check_run(run), number)
    try:
        store.put(key, json.dumps(without_secrets(job_doc), indent=1, sort_keys=True).encode(), if_absent=True)
    except AlreadyExists:
        if number == 1:
            raise AlreadyExists(name_taken(store, run)) from None
        fault = f"the run {run!r} at {store.url} was resumed by somebody else at the same time"
        fix = f"follow it with `raypp status {store.url.rstrip('/')}/{run} --watch`"
        raise AlreadyExists(Problem("name", fault, fix)) from None
    return key


def name_taken(store: ObjectStore, run: str) -> Problem:
    """Returns the problem that a run of this name exists."""
    fault = f"a run named {run!r} already exists at {store.url}"
    fix = f"resume it (`raypp submit --resume`), delete it (`raypp delete {run}`), or choose another name (`--name …`)"
    return Problem("name", fault, fix)


def newest_number(store: ObjectStore, run: str) -> int:
    """Returns the number of the last submission's spec; 0 if there is none."""
    numbers = (spec_number(run, info.key) for info in store.list(f"{check_run(run)}/spec"))
    return max((number for number in numbers if number is not None), default=0)


def read_spec(store: ObjectStore, run: str, number: int | None = None) -> dict[str, Any]:
    """Reads a run's resolved job: that of the last resume, or the one with this number. Raises
    CheckpointError: no run has this name, or its job cannot be read."""
    if number is None:
        number = newest_number(store, run)
    key = spec_key(run, max(number, 1))
    try:
        data = store.get(key, 0, _BOUNDS.size + 1)
    except NotFound:
        fault = f"there is no run {run!r} here"
        raise CheckpointError(Problem(f"{store.url}/{key}", fault, "check the URL and the name")) from None
    url = f"{store.url}/{key}"
    fix = "check whether another program wrote it"
    return dict(parse_as(_Spec, data, url, _BOUNDS, fix=fix, kind="a valid job", unknown="allow"))


def write_decision(store: ObjectStore, decision: Decision, attempt: int) -> None:
    """Writes what was decided for an attempt, without the secrets of its job."""
    document = decision.document(job=without_secrets(job_document(decision.job)))
    store.put(decision_key(decision.job.name, attempt), json.dumps(document, indent=1).encode())


def read_decision(store: ObjectStore, run: str, attempt: int) -> Decision:
    """Reads an attempt's decision. Raises CheckpointError: missing, damaged, of a newer raypp."""
    return _decided(Decision.read, store, run, attempt)


def read_pipeline(store: ObjectStore, run: str, attempt: int) -> ResolvedPipeline:
    """Reads only the pipeline of an attempt: the job beside it may be somebody else's. Raises
    CheckpointError, as `read_decision`."""
    return _decided(ResolvedPipeline.read, store, run, attempt)


def _decided(read: Callable[[dict[str, Any]], _T], store: ObjectStore, run: str, attempt: int) -> _T:
    key = decision_key(run, attempt)
    place, fix = f"{store.url}/{key}", "end the run's ranks, and resume it: `raypp submit JOB --resume`"
    try:
        data = store.get(key, 0, _BOUNDS.size + 1)
    except NotFound:
        raise CheckpointError(Problem(place, "is missing", fix)) from None
    document = parse_as(dict[str, Any], data, place, _BOUNDS, fix=fix, kind="a decision")
    if document.get("version") != VERSION:
        what = f"has the layout version {document.get('version')!r}; this raypp reads {VERSION}"
        raise CheckpointError(Problem(place, what, "use the raypp that wrote it, or resume the run"))
    try:
        return read(document)
    except (KeyError, ValueError) as error:
        raise CheckpointError(Problem(place, f"is not a decision: {in_words(error).splitlines()[0]}", fix)) from None
