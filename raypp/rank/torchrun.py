"""Runs a job's ranks without Ray: `torchrun … -m raypp.rank --job JOB`.

Each process derives its seat from torchrun's environment. Rank 0 writes the run's records.
"""

import argparse
import atexit
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from raypp.environment import NCCL_OF_TORCH
from raypp.errors import EXIT_OK, EXIT_RUN_FAILED, JobError, Problem, RayppError, origin_in_words
from raypp.job.checks import check_spec
from raypp.job.job import Job
from raypp.job.job_file import load_job
from raypp.job.load import job_document
from raypp.job.small_files import contents
from raypp.job.trackers import missing_for_trackers
from raypp.planning.decide import decide, settle
from raypp.planning.decision import Decision, Facts
from raypp.planning.geometry import Mesh
from raypp.rank.data.added_tokens import with_rows
from raypp.rank.data.loader import with_steps
from raypp.rank.device_check import facts_here
from raypp.rank.joining.process_group import connect
from raypp.rank.own_seat import seat_from_environment
from raypp.rank.rank import run_rank
from raypp.records import END_EVENTS, Event, Requests, RunState, Seat, StepReport
from raypp.state.checkpoint.commit import claim_next_attempt, list_checkpoints
from raypp.state.checkpoint.compatibility import as_recorded, check_resume, check_steps
from raypp.state.checkpoint.from_run import with_run_model
from raypp.state.checkpoint.layout import step_folder
from raypp.state.checkpoint.run_files import write_run_files
from raypp.state.checkpoint.run_spec import RunEnd, newest_number, read_spec, write_decision, write_end, write_spec
from raypp.state.hf.from_hf import with_hf_sizes
from raypp.state.run_records.recorder import RunRecorder
from raypp.state.run_records.status import RankStatus, RunStatus
from raypp.state.run_records.tracking import Trackers
from raypp.storage import AlreadyExists, ObjectStore, open_store
from raypp.untrusted.documents import parse_as
from raypp.untrusted.text import VisibleFormatter, visible_lines

log = logging.getLogger(__name__)

_ATTEMPT = "raypp/attempt"
Remember = Callable[[Mapping[str, Any]], None]
"""Records on this machine that the user wrote a job."""
_CONTROLLER_KEYS = {
    "recovery": {
        "policy", "max_restarts", "hang_timeout_s", "elastic", "site_timeout_s", "standby", "orphan_timeout_s",
    },
    "resources": {"cpus_per_rank", "spares", "env"},
}  # fmt: skip
"""Keys of a job that only the controller acts on."""


class ConsoleReporter:
    """Prints a rank's reports; on rank 0 also writes them to the run's records."""

    def __init__(self, job: Job, seat: Seat, store: ObjectStore | None) -> None:
        self._job = job
        self.stop_requested = False
        self._recorder = None
        if store is None:
            return
        self._store, self._number = store, newest_number(store, job.name)
        self._recorder = RunRecorder(store, job.name, f"torchrun-{seat.attempt}")
        self._trackers = Trackers(job, self.event)
        self._status = RunStatus(
            job.name,
            RunState.RUNNING,
            steps=job.train.steps,
            attempt=seat.attempt,
            restarts=seat.attempt - 1,
            mesh=job.mesh.axes,
            ranks=tuple(
                RankStatus(rank, Mesh.of(job.mesh).coordinates(rank), state="running")
                for rank in range(seat.world_size)
            ),
        )
        self._recorder.status(self._status)

    def _show(self, **changed: object) -> None:
        if self._recorder is not None:
            self._status = replace(self._status, **changed)  # type: ignore[arg-type]
            self._recorder.status(self._status)

    def phase(self, name: str, detail: str = "", reached: Callable[[], bool] | None = None) -> None:
        pass

    def step(self, report: StepReport) -> None:
        if self._recorder is not None:
            self._recorder.step(report)
            self._trackers.step(report)
        speed = {"tflops": report.values.get("tflops"), "mfu": report.values.get("mfu")}
        self._show(step=report.step, loss=report.loss, tokens_per_s=report.tokens_per_s, **speed)
        log.info(
            "step %d/%d  loss %.4f  grad norm %.3f  seq %d  %.0f tokens/s  %.3f s",
            report.step, self._job.train.steps, report.loss, report.grad_norm, report.seq_len, report.tokens_per_s,
            report.step_s,
        )  # fmt: skip

    def event(self, event: Event) -> None:
        if self._recorder is not None:
            self._recorder.event(event)
            self._trackers.event(event)
        if event.kind == "committed" and event.step is not None:
            self._show(checkpoint=f"{self._job.checkpoint.url.rstrip('/')}/{step_folder(self._job.name, event.step)}")
        log.info("%s: %s", event.kind, event.message)

    def requests(self) -> Requests:
        return Requests(stop=self.stop_requested)

    def stop_on_sigterm(self) -> None:
        """Makes SIGTERM save and stop. torchrun forwards SIGTERM, then waits for 30 seconds."""
        signal.signal(signal.SIGTERM, lambda _number, _frame: setattr(self, "stop_requested", True))

    def end(self, event: Event, state: RunState, error: str | None = None) -> None:
        """Writes the run's final event and status, and waits until they are in the store."""
        self.event(event)
        if self._recorder is not None:
            if not self._trackers.close(str(state)):
                # What is registered last runs first: a library's exit hooks would hang, too.
                atexit.register(os._exit, EXIT_OK if error is None else EXIT_RUN_FAILED)
            word = "done" if error is None else "ended"
            ranks = tuple(replace(rank, state=word) for rank in self._status.ranks)
            self._show(state=state, error=error, ranks=ranks)
            code, status = EXIT_OK if error is None else EXIT_RUN_FAILED, self._status
            place, attempt = status.checkpoint, status.attempt
            write_end(
                self._store, RunEnd(status.run, state, code, status.step, place, error or "", attempt), self._number
            )
            self._recorder.close()


@dataclass(frozen=True)
class _Told:
    """What rank 0 tells the others before they decide."""

    attempt: int
    precision: str
    reduction: str
    facts: Facts


def begin_run(store: ObjectStore, job: Job, seat: Seat) -> tuple[int, Decision]:
    """Writes the job to the store, or checks it against the existing run; claims the next attempt.
    `seat`: rank 0's, by whose device and node is decided. Returns the attempt's number, and what
    was decided for it. Raises JobError: the run of that name cannot be continued by this job; names
    each field. Or a tracker lacks its library or its key."""
    if lacking := missing_for_trackers(job, os.environ, here=True):
        raise JobError(lacking)
    asked = job
    facts = facts_here(seat)
    job = settle(asked, facts)
    try:
        write_spec(store, job.name, job_document(job))
    except AlreadyExists:
        before = read_spec(store, job.name)
        job = settle(as_recorded(asked, before), facts)
        problems = check_resume(before, job)
        if saved := list_checkpoints(store, job.name):
            problems += check_steps(saved[-1].step, job.train.steps)
        if problems:
            raise JobError(problems) from None
        write_spec(store, job.name, job_document(job), newest_number(store, job.name) + 1)
    write_run_files(store, job.name, contents(job_document(job)))
    attempt, decision = claim_next_attempt(store, job.name), decide(job, facts)
    write_decision(store, decision, attempt)
    return attempt, decision


def main(arguments: Sequence[str] | None = None, remember: Remember | None = None) -> int:
    """Runs this process's rank and returns its exit code."""
    parser = argparse.ArgumentParser(prog="torchrun … -m raypp.rank", description="Run one rank of a job without Ray.")
    parser.add_argument("--job", required=True, help="the job file")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C", help="override a key of the job")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    options = parser.parse_args(arguments)
    shown = logging.StreamHandler(sys.stdout)
    shown.setFormatter(VisibleFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[shown])
    logging.getLogger("raypp").setLevel(logging.INFO)
    try:
        file = with_rows(with_run_model(with_hf_sizes(load_job(options.job, options.set))))
        problems = check_spec(file.job, file.directory)
        if file.job.outer is not None and file.job.outer.every_steps == "auto":
            what = "auto is decided by `raypp submit`; under torchrun nobody does"
            fix = "add --set train.sync.every_steps=N, with the number that `raypp plan` says"
            problems.append(Problem("train.sync.every_steps", what, fix))
        if problems:
            raise JobError([file.locate(problem) for problem in problems])
        job, words = with_steps(file.job)
        file = replace(file, job=job, remarks=(*file.remarks, *filter(None, [words])))
        seat = seat_from_environment(file.job)
        if seat.rank == 0 and (ignored := for_a_controller(file.job)):
            log.warning("without effect under torchrun, which starts and restarts the ranks: %s", ", ".join(ignored))
        for remark in file.remarks if seat.rank == 0 else ():
            log.warning("note: %s", remark)
        return _run(file.job, seat, remember)
    except RayppError as error:
        if options.debug:
            raise
        if os.environ.get("RANK", "0") == "0" or not isinstance(error, JobError):
            print(visible_lines(error), file=sys.stderr)  # noqa: T201
        return error.exit_code


def for_a_controller(job: Job) -> list[str]:
    """Returns the keys of the job file that are for a controller, which is not there."""
    return [
        f"{name}.{key}"
        for name, keys in _CONTROLLER_KEYS.items()
        for key in sorted(keys & getattr(job, name).model_fields_set)
    ]


def _run(job: Job, seat: Seat, remember: Remember | None = None) -> int:
    for name, setting in NCCL_OF_TORCH.items():  # before there is a group, which reads them
        os.environ.setdefault(name, setting)
    rendezvous = connect(seat.master_addr, seat.master_port, seat.world_size, serve=seat.rank == 0)
    store = open_store(job.checkpoint.url) if seat.rank == 0 else None
    attempt, decision = _agree_on_attempt(job, seat, rendezvous, store)
    job = decision.job
    if seat.rank == 0 and remember is not None:
        remember(job_document(job))
    seat = replace(seat, attempt=attempt)
    reporter = ConsoleReporter(job, seat, store)
    reporter.stop_on_sigterm()
    try:
        result = run_rank(decision, seat, reporter, rendezvous)
    except BaseException as error:
        cause = origin_in_words(error).strip().splitlines()[0]
        message = f"rank {seat.rank} failed: {cause}"
        reporter.end(Event("failed", message, attempt=seat.attempt, rank=seat.rank), RunState.FAILED, message)
        raise
    if seat.rank == 0:
        state = RunState.STOPPED if result.stopped else RunState.SUCCEEDED
        last = Event(END_EVENTS[state], f"after step {result.step}", attempt=seat.attempt, step=result.step)
        reporter.end(last, state)
    return 0


def _agree_on_attempt(job: Job, seat: Seat, rendezvous: TCPStore, store: ObjectStore | None) -> tuple[int, Decision]:
    """Begins the run on rank 0 and sends the others the attempt and what to decide by, or a
    refusal. They decide the same for their own job file: what comes over the network is not run.
    Uses one key per restart by torchrun's agent."""
    key = f"{_ATTEMPT}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    if store is None:
        try:
            answer = rendezvous.get(key).decode()
        except dist.DistNetworkError:  # rank 0 has ended, and the server with it, before this could be read
            answer = "refused"
        if answer == "refused":
            raise JobError("rank 0 refused the job, or ended", "see rank 0's error message")
        told = parse_as(_Told, answer.encode(), "rank 0's answer", error=JobError)
        return told.attempt, decide(job.with_precision(told.precision).with_reduction(told.reduction), told.facts)
    try:
        number, decision = begin_run(store, job, seat)
    except BaseException:
        rendezvous.set(key, "refused")
        raise
    job = decision.job
    told = _Told(number, job.train.precision, job.mesh.reduce_gradients, decision.facts)
    rendezvous.set(key, json.dumps(asdict(told)))
    return number, decision
