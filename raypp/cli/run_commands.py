"""`raypp submit | save | stop`: start a run and control it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

import raypp
from raypp.api.checked_job import load_checked_job
from raypp.api.find_run import find_run, open_reader, present_status, runs_below
from raypp.checkpoint.commit import list_checkpoints
from raypp.checkpoint.compatibility import check_resume, check_steps
from raypp.checkpoint.run_spec import add_spec, name_taken, read_spec, write_spec
from raypp.cli.job_argument import job_argument
from raypp.cli.live import LiveView
from raypp.cli.output import echo, echo_json, echo_lines
from raypp.cli.render import one_line
from raypp.clusters import known_runs
from raypp.clusters.dashboard import FINAL_JOB_STATES, NoAnswerError
from raypp.clusters.find import Cluster, find_cluster, lend_store_settings
from raypp.clusters.known_runs import RunPlace
from raypp.control import client
from raypp.errors import (
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_RUN_FAILED,
    CheckpointError,
    JobError,
    Problem,
    RayppError,
    RunFailedError,
    UnreachableError,
)
from raypp.kinds import store_kind
from raypp.observe.reader import RunReader
from raypp.observe.status import is_final
from raypp.records import RunState
from raypp.spec.job import Job
from raypp.spec.load import JobFile, job_document
from raypp.storage import AlreadyExists, ObjectStore, StoreError, open_store
from raypp.untrusted.text import shell_word

_JSON_KEYS = ("run", "state", "step", "loss", "tokens_per_s", "restarts", "checkpoint")
_JOB_POLL_S = 2.0
_RECORDS_PATIENCE_S = 15.0
_JOB_END_WAIT_S = 30.0
_JOB_END_POLL_S = 0.3
_ASK_S = 20.0
_LOG_PAUSE = 9.0
"""Pause between two looks at a job's log, which the dashboard always sends whole, in looks."""


@click.command("submit")
@job_argument
@click.option(
    "--address",
    metavar="A",
    help="URL of the cluster's dashboard, http://host:8265.  [default: RAYPP_ADDRESS, then the embedded cluster]",
)
@click.option("--detach", is_flag=True, help="Return once the cluster has accepted the run.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line.")
@click.option("--dry-run", is_flag=True, help="Check everything, including the store and the cluster. Start nothing.")
@click.option("--resume", is_flag=True, help="Resume the run of this name from its newest checkpoint.")
def submit_command(
    job: Path, overrides: tuple[str, ...], address: str | None, detach: bool, as_json: bool, dry_run: bool, resume: bool
) -> None:
    """Check JOB, submit it to the cluster, and follow the run to its end.

    The run continues after Ctrl-C. The exit code is that of the run: 0 if it succeeded, 1 if it
    failed.
    """
    file = load_checked_job(job, overrides)
    if not resume and file.job.model.from_hf is not None:
        from raypp.hf.from_hf import check_hf_weights

        check_hf_weights(file.job)
    cluster = find_cluster(address)
    try:
        client.check_trackers(file.job, cluster)
    except JobError as error:
        raise JobError(file.locate(problem) for problem in error.problems) from None
    lent = lend_store_settings(cluster.embedded)
    if lent and store_kind(file.job.checkpoint.url).embedded:
        echo(f"store: the embedded cluster's S3 server at {lent} (no AWS settings in the environment)", err=True)
    versions = cluster.dashboard.check_versions()
    store = open_store(file.job.checkpoint.url)
    store.probe()
    for limit in store.limitations():
        echo(f"warning: {limit}", err=True)
    _check_name(file, store, resume)
    _check_not_running(file.job, store, cluster)
    device = client.check_resources(file.job, cluster)
    if dry_run:
        echo(f"{file.job.name}: the job, the store and the cluster are fine; nothing was started", err=as_json)
        echo(f"  {_sides(versions)}", err=as_json)
        if as_json:
            _print_json({"run": file.job.name})
        return
    place, view = _submit(file, store, cluster, resume)
    echo(
        f"{place.name}: accepted by {cluster.address} as Ray job {place.submission_id}, "
        f"{file.job.mesh.world} ranks on {device}",
        err=as_json,
    )
    echo(f"  {_sides(versions)}", err=as_json)
    if detach:
        _print_follow_commands(place, as_json)
        if as_json:
            _print_json({"run": place.name, "state": str(RunState.PENDING)})
        return
    raise SystemExit(_follow(place, RunReader(store, place.name), cluster, view, as_json))


@click.command("save")
@click.argument("run")
def save_command(run: str) -> None:
    """Save a checkpoint of RUN now. Returns when it is committed."""
    echo(_save(*_active_run(run), on_wait=_says(f"{run}: the checkpoint is not committed yet")))


@click.command("stop")
@click.argument("run")
@click.option("--no-save", is_flag=True, help="Stop at once, without a final checkpoint.")
def stop_command(run: str, no_save: bool) -> None:
    """Stop RUN after a final checkpoint. Returns when the run has ended."""
    echo(_stop(*_active_run(run), no_save=no_save, on_wait=_says(f"{run}: the run has not ended yet")))


def command_of(place: RunPlace) -> Callable[[str], str]:
    """Returns a function that saves or stops a run and describes the result."""
    return lambda name: {"save": _save, "stop": _stop}[name](*_active(place, open_reader(place)))


def _says(what: str) -> Callable[[], None]:
    return lambda: echo(f"{what}; still waiting (Ctrl-C ends only the waiting)", err=True)


def _save(place: RunPlace, reader: RunReader, cluster: Cluster, *, on_wait: Callable[[], None] = lambda: None) -> str:
    answer = client.save_run(cluster, place, on_wait)
    if not answer["found"]:
        raise _not_active(place, reader, answer)
    if answer["committed"] is None:
        raise CheckpointError(
            Problem("RUN", answer["what"], f"see `raypp events {shell_word(place.name)}` for the cause")
        )
    return f"{place.name}: step {answer['committed']} is committed: {answer['what']}"


def _stop(
    place: RunPlace,
    reader: RunReader,
    cluster: Cluster,
    *,
    no_save: bool = False,
    on_wait: Callable[[], None] = lambda: None,
) -> str:
    answer = client.stop_run(cluster, place, reader, save=not no_save, on_wait=on_wait)
    if not answer["found"]:
        raise _not_active(place, reader, answer)
    checkpoint = answer["checkpoint"] or "none"
    ended = f"{answer['state']} at step {answer['step']}; newest checkpoint: {checkpoint}"
    if answer.get("exit_code"):
        raise RunFailedError(
            Problem("RUN", f"{place.name}: {ended}: {answer['reason']}", f"see `raypp events {shell_word(place.name)}`")
        )
    return f"{place.name}: {ended}"


def _sides(versions: dict[str, str]) -> str:
    """Names the cluster's versions, and the version of raypp whose code travels with the job."""
    there = ", ".join(f"{name.capitalize()} {version}" for name, version in versions.items() if version)
    return f"the cluster has {there}; the code of raypp {raypp.__version__} travels with the job"


# submit: the steps
# ------------------------------------------------------------------------------------


def _check_name(file: JobFile, store: ObjectStore, resume: bool) -> None:
    """Checks that a new run's name is free, or that a resumed run's checkpoints fit the job."""
    name = file.job.name
    exists = store.head(f"{name}/spec.json") is not None
    if exists and not resume:
        raise JobError(file.locate(name_taken(store, name)))
    if resume and not exists:
        hint = known_runs.hint_of_names(name, [shell_word(one) for one in runs_below(store)], "`--set name={}`")
        fix = "leave out --resume to start a new run" + (f"; {hint}" if hint else "")
        problem = Problem("name", f"there is no run named {name!r} at {store.url} to resume", fix)
        raise JobError(file.locate(problem))
    # Before the first checkpoint a change to the job cannot make anything unusable, so mistakes can
    # be corrected.
    if resume and (saved := list_checkpoints(store, name)):
        problems = check_resume(read_spec(store, name), file.job) + check_steps(saved[-1].step, file.job.train.steps)
        if problems:
            raise JobError(map(file.locate, problems))


def _check_not_running(job: Job, store: ObjectStore, cluster: Cluster) -> None:
    """Refuses a name whose run is still active, also if it is another store's.

    Waits a little for the Ray job of a run that has ended.

    The run's driver and Ray notice the end of a run with a delay.
    """
    place, reader = RunPlace(store.url, job.name, cluster.address), RunReader(store, job.name)
    known_runs.check_namesakes(cluster.dashboard, place)
    end = time.monotonic() + _JOB_END_WAIT_S
    while is_final(reader.status()):
        jobs = known_runs.living_jobs(cluster.dashboard, place)
        if not jobs:
            return  # its controller may linger; the next submission ends it
        if time.monotonic() > end:
            what = f"the run {job.name!r} has ended, but its Ray job {jobs[0]} has not, {_JOB_END_WAIT_S:.0f} s later"
            fix = f"wait until the Ray dashboard shows that it ended, or stop it: `ray job stop {shell_word(jobs[0])}`"
            raise JobError(Problem("name", what, fix))
        time.sleep(_JOB_END_POLL_S)
    alive = known_runs.controller_alive(place, _ASK_S)
    if alive is None:
        what = f"the cluster at {cluster.address} does not say whether the run {job.name!r} is active"
        raise UnreachableError(Problem("address", what, "submit it again when the cluster answers"))
    if alive:
        raise JobError(
            Problem(
                "name",
                f"a run named {job.name!r} is active in this cluster",
                f"follow it with `raypp status {job.name} --watch`, stop it with `raypp stop {job.name}`, "
                "or choose another name",
            )
        )


def _submit(file: JobFile, store: ObjectStore, cluster: Cluster, resume: bool) -> tuple[RunPlace, LiveView]:
    """Submits the run and remembers it.

    A new run's name is taken at the last moment: whoever interrupts the upload before can submit
    the job again. It is free again if the cluster does not accept the run. It stays taken if nobody
    knows whether the cluster has it.
    """
    job, view, asked = file.job, LiveView(), False
    if resume:
        view.skip_earlier_records(RunReader(store, job.name))

    def write() -> None:
        nonlocal asked
        try:
            (add_spec if resume else write_spec)(store, job.name, job_document(job))
        except AlreadyExists as error:  # another submission was quicker
            raise JobError(map(file.locate, error.problems)) from None
        asked = True

    try:
        submission = client.submit_run(job, cluster, store.url, before=write)
    except NoAnswerError as error:
        if not asked:
            raise
        raise UnreachableError([*error.problems, _perhaps_accepted(job)]) from None
    except KeyboardInterrupt:
        if asked:
            perhaps = _perhaps_accepted(job)
            echo(err=True)
            echo(f"{perhaps.what}: {perhaps.fix}", err=True)
        raise
    except RayppError:
        if asked and not resume:
            store.delete([f"{job.name}/spec.json"])
        raise
    place = RunPlace(store.url, job.name, cluster.address, submission.submission_id, time.time())
    try:
        known_runs.remember_run(place)
    except JobError as error:  # the run has been accepted
        what = error.problems[0].what
        echo(f"warning: this machine does not remember the run: {what}; name it as {place.url}/{place.name}", err=True)
    return place, view


def _perhaps_accepted(job: Job) -> Problem:
    """Returns the problem of a run of which nobody knows whether the cluster has it."""
    name = shell_word(job.name)
    fix = f"`raypp status {name}` tells; if there is no such run, submit it again with --resume"
    return Problem("name", f"the cluster may have accepted the run {job.name!r}", fix)


def _follow(place: RunPlace, reader: RunReader, cluster: Cluster, view: LiveView, as_json: bool) -> int:
    """Shows the run until it ends. Returns the run's exit code."""
    if as_json:
        view.console.file = sys.stderr
    watch = _JobWatch(cluster, place)
    try:
        try:
            status = view.follow(place, reader, watch.over)
        except StoreError as error:
            echo(
                f"cannot read the run's records from here ({one_line(str(error))}); showing the Ray job's log instead",
                err=True,
            )
            code = watch.tail_log(err=as_json)
            if as_json:
                _print_json({"run": place.name})
            return code
        code = watch.exit_code(status, reader)
        view.summary(place, status, reader.history(), reader.events())
    except KeyboardInterrupt:
        echo(err=True)
        echo(f"{place.name} continues in the cluster", err=True)
        _print_follow_commands(place, True)
        return EXIT_INTERRUPTED
    if as_json:
        _print_json(status)
    return code


class _JobWatch:
    """The Ray job of a run, polled at intervals."""

    def __init__(self, cluster: Cluster, place: RunPlace) -> None:
        self._dashboard = cluster.dashboard
        self._place = place
        self._id = place.submission_id
        self._looked = 0.0
        self._ended: float | None = None
        self.job: dict[str, Any] | None = None

    def over(self) -> bool:
        """Whether no more records will come: the job ended a while ago and no controller runs.

        A controller can outlive its job's driver and lead the run to its end without it.
        """
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

    def exit_code(self, status: dict[str, Any], reader: RunReader) -> int:
        """Returns the run's exit code from its records, else its driver's.

        Waits a little for the driver to end.
        """
        for _ in range(50):
            self._look()
            if self._ended is not None:
                break
            time.sleep(0.1)
        if status["state"] == RunState.SUCCEEDED:
            return EXIT_OK
        # Not if it only seems to have failed, because nothing has been recorded any more.
        recorded = is_final(status) and is_final(reader.status())
        code = _recorded_exit_code(reader) if recorded else None  # a driver that was killed has none
        if status["state"] == RunState.STOPPED:
            return code or EXIT_OK
        code = (self.job or {}).get("driver_exit_code") if code is None else code
        if not recorded:
            message = (self.job or {}).get("message") or "it no longer exists"
            echo(f"the run's Ray job ended before the run did: {message}", err=True)
        return code if isinstance(code, int) and 0 < code < 128 else EXIT_RUN_FAILED

    def tail_log(self, err: bool = False) -> int:
        """Prints the job's log until the job ends. Returns its exit code.

        Args:
            err: To standard error.
        """
        shown = 0
        while True:
            self._look()
            asked = time.monotonic()
            log = self._dashboard.job_logs(self._id)
            took_s = time.monotonic() - asked
            echo_lines(log[shown:], nl=False, err=err)
            shown = len(log)
            if self._ended is not None:
                code = (self.job or {}).get("driver_exit_code")
                return code if isinstance(code, int) and 0 <= code < 128 else EXIT_RUN_FAILED
            time.sleep(max(_JOB_POLL_S / 2, _LOG_PAUSE * took_s))


def _recorded_exit_code(reader: RunReader) -> int | None:
    ends = [event for event in reader.events() if event.kind in ("failed", "stopped")]
    code = ends[-1].details.get("exit_code") if ends else None
    return code if isinstance(code, int) else None


def _print_follow_commands(place: RunPlace, err: bool) -> None:
    name = shell_word(place.name)
    echo(f"  follow it:  raypp status {name} --watch", err=err)
    echo(f"  its output: raypp logs {name} --follow", err=err)
    echo(f"  stop it:    raypp stop {name}", err=err)


def _print_json(status: dict[str, Any]) -> None:
    echo_json({key: status.get(key) for key in _JSON_KEYS})


# save and stop
# ----------------------------------------------------------------------------------------


def _active_run(run: str) -> tuple[RunPlace, RunReader, Cluster]:
    return _active(*find_run(run))


def _active(place: RunPlace, reader: RunReader) -> tuple[RunPlace, RunReader, Cluster]:
    status = reader.status()
    if is_final(status):
        raise _not_active(place, reader)
    return place, reader, known_runs.cluster_of(place)


def _not_active(place: RunPlace, reader: RunReader, answer: dict[str, Any] | None = None) -> JobError:
    state = present_status(place, reader)["state"]
    words = state if RunState(state).final else f"{state} according to its records"
    return client.no_such_controller(place.name, words, answer)
