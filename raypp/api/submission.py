"""Submits a job after every check that a cluster and a store allow, and watches its Ray job."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from raypp.api.checked_job import count_own_model
from raypp.control import client
from raypp.control.clusters import known_runs
from raypp.control.clusters.dashboard import FINAL_JOB_STATES, NoAnswerError
from raypp.control.clusters.find import Cluster, find_cluster, lend_store_settings
from raypp.control.clusters.known_runs import RunPlace
from raypp.control.find_run import ended_status, find_run, present_status, runs_below
from raypp.control.queue import client as queue_client
from raypp.control.queue.client import line_exists, user_name
from raypp.control.queue.line import Need, Priority
from raypp.control.queue.ticket import Ticket, circle, kept_place, write_ticket
from raypp.errors import EXIT_RUN_FAILED, JobError, Problem, RayppError, ResourcesError, UnreachableError
from raypp.job.checks import check_training
from raypp.job.job import Job
from raypp.job.job_file import JobFile
from raypp.job.load import job_document
from raypp.kinds import store_kind
from raypp.planning.check import check_plan
from raypp.planning.decision import Facts
from raypp.planning.plan import Grounds, make_plan, with_every_steps
from raypp.records import RunState
from raypp.state.checkpoint.commit import list_checkpoints
from raypp.state.checkpoint.compatibility import as_recorded, check_resume, check_steps, rate_jump
from raypp.state.checkpoint.from_run import check_first_run
from raypp.state.checkpoint.known_jobs import remember_job
from raypp.state.checkpoint.run_files import travelling_files, write_run_files
from raypp.state.checkpoint.run_spec import RunEnd, name_taken, newest_number, read_spec, write_spec
from raypp.state.run_records.reader import RunReader
from raypp.state.run_records.status import is_final
from raypp.storage import AlreadyExists, ObjectStore, open_store
from raypp.untrusted.text import shell_word

_JOB_END_WAIT_S = 30.0
_JOB_END_POLL_S = 0.3
_ASK_S = 20.0
_ASK_AGAIN_S = 5.0

Say = Callable[[str], None]
"""Takes a remark for the user."""


@dataclass(frozen=True)
class Prepared:
    """A job that may be submitted. `facts`: what decisions take into account of the cluster.
    `waits`: why it gets no devices now: they are taken, or others wait; empty if it does. `after`:
    runs that have to succeed first, as URL/NAME."""

    file: JobFile
    store: ObjectStore
    cluster: Cluster
    resume: bool
    facts: Facts
    versions: dict[str, str]
    files: Mapping[str, bytes] = field(default_factory=dict)
    waits: str = ""
    after: Sequence[str] = ()


def prepare(
    file: JobFile, address: str | None, resume: bool, say: Say, *, now: bool = False, after: Sequence[str] = ()
) -> Prepared:
    """Checks weights, cluster, store, name and resources. Starts nothing.

    Args:
        file: The job, which `load_checked_job` or `checked` found right.
        address: URL of the cluster's dashboard; None: RAYPP_ADDRESS, then the embedded cluster.
        resume: Whether the run of this name is to be resumed.
        now: Whether a run that gets no devices now is refused.
        after: Runs that have to succeed first.
        say: Gets what the user should know, as soon as it is known.

    Raises:
        JobError: The job cannot run there, its name is taken, or what it comes after has failed.
        UnreachableError: The cluster does not answer.
        StoreError: The store does not.
        ResourcesError: The cluster has not enough devices; with `now`, not enough free ones.
    """
    if not resume and file.job.model.from_hf is not None:
        from raypp.state.hf.from_hf import check_hf_weights

        check_hf_weights(file.job.model)
    cluster = find_cluster(address)
    try:
        client.check_trackers(file.job, cluster)
    except JobError as error:
        raise JobError(file.locate(problem) for problem in error.problems) from None
    embedded = cluster.embedded
    if embedded is not None and embedded.python == sys.executable and (why := count_own_model(file.job)):
        raise JobError(file.locate(Problem("model.kind", f"{file.job.model.kind} cannot be built: {why}")))
    lent = lend_store_settings(cluster.embedded)
    if lent and store_kind(file.job.checkpoint.url).embedded:
        say(f"store: the embedded cluster's S3 server at {lent} (no AWS settings in the environment)")
    versions = cluster.dashboard.check_versions()
    store = open_store(file.job.checkpoint.url)
    store.probe()
    for limit in store.limitations():
        say(f"warning: {limit}")
    file = _check_name(file, store, resume, say)
    _check_not_running(file.job, store, cluster)
    first = _after(after, f"{store.url}/{file.job.name}", cluster, now)
    if file.job.model.from_run is not None and not resume:
        try:
            check_first_run(file.job.model.from_run, first)
        except JobError as error:
            raise JobError(map(file.locate, error.problems)) from None
    facts, job, waits = _resources(file.job, cluster, now)
    job, decided = with_every_steps(job, Grounds(device=facts.device))
    if decided:
        say(decided)
    if file.job.mesh.reduce_gradients == "auto" and job.reduces_each:
        say("mesh.reduce_gradients: auto is each_microbatch on these nodes (`raypp plan` says why)")
    if remark := client.precision_remark(file.job, job, facts):
        say(remark)
        # What was checked may have been the job on another device.
        if problems := [*check_training(job), *check_plan(job)]:
            raise JobError(map(file.locate, problems))
    try:
        files = travelling_files(job, store, resume, say)
    except JobError as error:
        raise JobError(map(file.locate, error.problems)) from None
    waits = f"it comes after {', '.join(first)}" if first else waits
    return Prepared(replace(file, job=job), store, cluster, resume, facts, versions, files, waits, first)


def _after(names: Sequence[str], own: str, cluster: Cluster, now: bool) -> list[str]:
    """Returns those of the runs that have not succeeded yet, as URL/NAME. Raises JobError: one
    never will, runs elsewhere, or would wait for this run, `own`."""
    runs = dict[str, str | None]()
    for name in names:
        place, reader = find_run(name)
        status = present_status(place, reader)
        if is_final(status) and status["state"] != RunState.SUCCEEDED:
            why = f": {status['error']}" if status["error"] else ""
            raise JobError(Problem("--after", f"{name} is {status['state']}{why}", "resume it, or leave out --after"))
        if not is_final(status):
            runs[f"{place.url}/{place.name}"] = place.address
    if not runs:
        return []
    if now:
        raise JobError(Problem("--now", "a run waits for those of --after", "leave out one of the two"))
    waiting = {f"{row['url']}/{row['run']}": row["after"] for row in queue_client.show(cluster)["waiting"]}
    for run, address in runs.items():
        if address != cluster.address and run not in waiting:
            fault = f"{run} runs on {address or 'no cluster that is known here'}, not on {cluster.address}"
            raise JobError(Problem("--after", fault, "submit this run when that one has ended"))
    if found := circle(own, list(runs), waiting):
        raise JobError(Problem("--after", f"would wait for each other: {', '.join(found)}", "leave out --after"))
    return list(runs)


def _resources(job: Job, cluster: Cluster, now: bool) -> tuple[Facts, Job, str]:
    """Returns what `client.check_resources` does, and why the run has to wait for devices."""
    try:
        facts, job = client.check_resources(job, cluster)
        free = now or not line_exists(cluster)
        return facts, job, "" if free else "others wait, or the line is paused, or a node held"
    except ResourcesError as error:
        if now:
            raise
        facts, job = client.check_resources(job, cluster, idle=True)
        return facts, job, error.problems[0].fault


def start(prepared: Prepared, say: Say, *, priority: Priority = "normal", user: str | None = None) -> RunPlace:
    """Submits the run and remembers it on this machine. `user`: for the record; None: the login.

    A new run's name is taken at the last moment: whoever interrupts the upload before can submit
    the job again. It is free again if the cluster does not accept the run. It stays taken if nobody
    knows whether the cluster has it.

    Raises:
        UnreachableError: The cluster refuses the run, or does not answer.
        JobError: Another submission of this name was quicker.
        KeyboardInterrupt: With a note, if the cluster may have the run.
    """
    job, store, asked = prepared.file.job, prepared.store, False
    number = _next_number(prepared)

    def write() -> None:
        nonlocal asked
        _take_name(prepared, number)
        asked = True
        write_run_files(store, job.name, prepared.files)

    try:
        submission_id = client.submit_run(
            job,
            prepared.cluster,
            store.url,
            facts=prepared.facts,
            number=number,
            before=write,
            files=prepared.files,
            user=user_name(user),
            priority=priority,
        )
    except NoAnswerError as error:
        if not asked:
            raise
        raise UnreachableError([*error.problems, _perhaps_accepted(job)]) from None
    except KeyboardInterrupt as interrupt:
        if asked:
            perhaps = _perhaps_accepted(job)
            interrupt.add_note(f"{perhaps.fault}: {perhaps.fix}")
        raise
    except RayppError:
        if asked and not prepared.resume:
            store.delete([f"{job.name}/spec.json"])
        raise
    return _remember(prepared, submission_id, say)


def enqueue(prepared: Prepared, say: Say, priority: Priority = "normal", user: str | None = None) -> Queued:
    """Makes all that the run needs later, and takes its name and its place. `Queued.follow` puts it
    into the cluster's line. Raises as `start`."""
    job, store, cluster, who = prepared.file.job, prepared.store, prepared.cluster, user_name(user)
    number = _next_number(prepared)
    options: dict[str, Any] = {"facts": prepared.facts, "number": number, "files": prepared.files}
    options |= {"after": prepared.after, "priority": priority}
    document = client.ray_job(job, cluster, store.url, **options, user=who, later=True)
    need = Need(job.mesh.world, float(job.resources.cpus_per_rank), float(prepared.facts.device == "cuda"))
    at = kept_place(store, job.name, number)
    planned, after = _planned_s(prepared), tuple(prepared.after)
    ticket = Ticket(job.name, store.url, number, who, priority, need, planned, document, at, after=after)
    _take_name(prepared, number)
    write_run_files(store, job.name, prepared.files)
    ticket = write_ticket(store, ticket)
    return Queued(cluster, ticket, _remember(prepared, ticket.submission_id, say))


def _next_number(prepared: Prepared) -> int:
    return newest_number(prepared.store, prepared.file.job.name) + 1 if prepared.resume else 1


def _take_name(prepared: Prepared, number: int) -> None:
    """Writes the spec. Raises JobError: another submission was quicker."""
    job = prepared.file.job
    try:
        write_spec(prepared.store, job.name, job_document(job), number)
    except AlreadyExists as error:
        raise JobError(map(prepared.file.locate, error.problems)) from None


@dataclass(frozen=True)
class Queued:
    """A run with a place in a line. `place`: where it will run."""

    cluster: Cluster
    ticket: Ticket
    place: RunPlace

    def follow(self, say: Say, *, detach: bool = False) -> Iterator[dict[str, Any]]:
        """Puts the run into the line and yields its place whenever that changes, until it has left:
        see `call.join`. `detach`: only the first. A cluster that does not answer is asked again,
        for ever; with `detach` it is an error."""
        while True:
            try:
                for told in queue_client.join(self.cluster, self.ticket, detach=detach):
                    yield told
                    if detach or told["state"] != "waiting":
                        return
            except RayppError as error:
                if detach:
                    raise
                say(f"the line cannot be asked; the run keeps its place: {error.problems[0].fault}")
            time.sleep(_ASK_AGAIN_S)


def _planned_s(prepared: Prepared) -> float | None:
    """Returns how long the run will train, by plan; None if it cannot be planned."""
    job, store = prepared.file.job, prepared.store
    saved = list_checkpoints(store, job.name) if prepared.resume else []
    try:
        step_s = make_plan(job, Grounds(device=prepared.facts.device)).step_s
    except RayppError:
        return None
    return step_s * max(0, job.train.steps - (saved[-1].step if saved else 0))


def _remember(prepared: Prepared, submission_id: str, say: Say) -> RunPlace:
    job, store = prepared.file.job, prepared.store
    place = RunPlace(store.url, job.name, prepared.cluster.address, submission_id, time.time())
    try:
        known_runs.remember_run(place)
        remember_job(job_document(job))
    except JobError as error:  # the run has been accepted
        fault = error.problems[0].fault
        say(f"warning: this machine does not remember the run: {fault}; name it as {place.url}/{place.name}")
    return place


def _check_name(file: JobFile, store: ObjectStore, resume: bool, say: Say) -> JobFile:
    """Checks that a new run's name is free, or that a resumed run's checkpoints fit the job.
    Returns the job; with checkpoints, `train.precision: auto` is what they were trained in."""
    name = file.job.name
    exists = store.head(f"{name}/spec.json") is not None
    if exists and not resume:
        raise JobError(file.locate(name_taken(store, name)))
    if resume and not exists:
        hint = known_runs.hint_of_names(name, [shell_word(one) for one in runs_below(store)], "`--set name={}`")
        fix = "leave out --resume to start a new run" + (f"; {hint}" if hint else "")
        problem = Problem("name", f"there is no run named {name!r} at {store.url} to resume", fix)
        raise JobError(file.locate(problem))
    # Before the first checkpoint no change makes anything unusable, so mistakes can be corrected.
    if resume and (saved := list_checkpoints(store, name)):
        before = read_spec(store, name)
        file = replace(file, job=as_recorded(file.job, before, say))
        problems = check_resume(before, file.job) + check_steps(saved[-1].step, file.job.train.steps)
        if problems:
            raise JobError(map(file.locate, problems))
        if jump := rate_jump(before, file.job, saved[-1].step):
            say(f"warning: {jump}")
    return file


def _check_not_running(job: Job, store: ObjectStore, cluster: Cluster) -> None:
    """Refuses a name whose run is still active. Waits a little for the Ray job of a run that has
    ended. The run's driver and Ray notice the end of a run with a delay."""
    place, reader = RunPlace(store.url, job.name, cluster.address), RunReader(store, job.name)
    end = time.monotonic() + _JOB_END_WAIT_S
    while ended_status(reader) is not None:
        jobs = known_runs.living_jobs(cluster.dashboard, place)
        if not jobs:
            return  # its controller may linger; the next submission ends it
        if time.monotonic() > end:
            fault = f"the run {job.name!r} has ended, but its Ray job {jobs[0]} has not, {_JOB_END_WAIT_S:.0f} s later"
            fix = f"wait until the Ray dashboard shows that it ended, or stop it: `ray job stop {shell_word(jobs[0])}`"
            raise JobError(Problem("name", fault, fix))
        time.sleep(_JOB_END_POLL_S)
    alive = known_runs.controller_alive(place, _ASK_S)
    if alive is None:
        fault = f"the cluster at {cluster.address} does not say whether the run {job.name!r} is active"
        raise UnreachableError(Problem("address", fault, "submit it again when the cluster answers"))
    if alive:
        follow, stop = f"`raypp status {job.name} --watch`", f"`raypp stop {job.name}`"
        fix = f"follow it with {follow}, stop it with {stop}, or choose another name"
        raise JobError(Problem("name", f"a run named {job.name!r} is active in this cluster", fix))


def _perhaps_accepted(job: Job) -> Problem:
    """Returns the problem of a run of which nobody knows whether the cluster has it."""
    name = shell_word(job.name)
    fix = f"`raypp status {name}` tells; if there is no such run, submit it again with --resume"
    return Problem("name", f"the cluster may have accepted the run {job.name!r}", fix)


_JOB_POLL_S = 2.0
_RECORDS_PATIENCE_S = 15.0


class JobWatch:
    """The Ray job of a run on the cluster that it was submitted to, polled at intervals."""

    def __init__(self, cluster: Cluster, place: RunPlace) -> None:
        self._dashboard = cluster.dashboard
        self._place = place
        self._id = place.submission_id
        self._looked = 0.0
        self._ended: float | None = None
        self.job: dict[str, Any] | None = None

    def over(self) -> bool:
        """Whether no more records will come: the job ended a while ago and no controller runs. A
        controller can outlive its job's driver and lead the run to its end without it."""
        now = time.monotonic()
        if now - self._looked < _JOB_POLL_S:
            return False
        self._looked = now
        self._look()
        if self._ended is None or now - self._ended <= _RECORDS_PATIENCE_S:
            return False
        return known_runs.controller_alive(self._place) is False

    def _look(self) -> None:
        try:
            self.job = self._dashboard.job(self._id)
        except RayppError:
            return  # the records show the run's progress; a cluster that does not respond does not mean the end
        if self.job is not None and self.job["status"] in FINAL_JOB_STATES and self._ended is None:
            self._ended = time.monotonic()

    def exit_code(self, end: RunEnd | None, say: Say) -> int:
        """Returns the run's exit code from its end; without one, that of its driver. Waits a little
        for the driver. `end`: None if nobody recorded it. `say`: gets remarks."""
        for _ in range(50):
            self._look()
            if self._ended is not None:
                break
            time.sleep(0.1)
        if end is not None:
            return end.exit_code
        if self._ended is not None or self.job is None:  # else the cluster is gone, as the status says
            message = (self.job or {}).get("message") or "it no longer exists"
            say(f"the run's Ray job ended before the run did: {message}")
        return self.driver_exit_code or EXIT_RUN_FAILED

    @property
    def driver_exit_code(self) -> int:
        self._look()
        code = (self.job or {}).get("driver_exit_code")
        return code if isinstance(code, int) and 0 <= code < 128 else EXIT_RUN_FAILED
