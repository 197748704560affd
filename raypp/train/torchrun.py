"""Without Ray: `torchrun … -m raypp.train --job JOB` runs the same ranks.

Every process makes its seat from torchrun's environment. Rank 0 keeps the run's records in the store, so that
`raypp status`, `history` and the rest read such a run like any other.
"""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
from collections.abc import Sequence

from raypp.errors import JobError, Problem, RayppError
from raypp.mesh.geometry import Mesh
from raypp.observe.recorder import RunRecorder
from raypp.records import Event, Requests, RunState, Seat, StepReport
from raypp.spec.job import Job
from raypp.spec.load import load_job
from raypp.storage import open_store
from raypp.train.rank import run_rank

log = logging.getLogger(__name__)


def seat_from_environment(job: Job) -> Seat:
    """This process's seat, from RANK, WORLD_SIZE, LOCAL_RANK … as torchrun sets them.

    Raises:
        JobError: torchrun's variables are missing, or its world is not the mesh's.
    """
    environment = os.environ
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in environment]
    if missing:
        raise JobError(
            Problem("", f"{', '.join(missing)} not set", "start it with: torchrun --nproc-per-node N -m raypp.train --job JOB")
        )
    mesh = Mesh.of(job.mesh)
    rank, world = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    if world != mesh.world:
        raise JobError(
            Problem("mesh", f"the mesh has {mesh.world} ranks, torchrun started {world}", f"use --nproc-per-node so that the world is {mesh.world}")
        )
    local = int(environment.get("LOCAL_RANK", rank))
    return Seat(
        run=job.name,
        attempt=int(environment.get("TORCHELASTIC_RESTART_COUNT", 0)) + 1,
        rank=rank,
        world_size=world,
        coordinates=mesh.coordinates(rank),
        mesh_sizes=mesh.sizes,
        local_rank=local,
        local_world_size=int(environment.get("LOCAL_WORLD_SIZE", 1)),
        node=socket.gethostname(),
        master_addr=environment["MASTER_ADDR"],
        master_port=int(environment["MASTER_PORT"]),
        device=_device(job),
        device_index=local,
    )


def _device(job: Job) -> str:
    if job.resources.device != "auto":
        return job.resources.device
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


class ConsoleReporter:
    """Prints what rank 0 says and, when it has a recorder, keeps it in the store."""

    def __init__(self, recorder: RunRecorder | None, steps: int) -> None:
        self.recorder, self.steps = recorder, steps

    def phase(self, name: str, detail: str = "") -> None:
        pass

    def step(self, report: StepReport) -> None:
        if self.recorder is not None:
            self.recorder.step(report)
        log.info(
            "step %d/%d  loss %.4f  grad norm %.3f  seq %d  %.0f tokens/s  %.3f s",
            report.step, self.steps, report.loss, report.grad_norm, report.seq_len, report.tokens_per_s, report.step_s,
        )  # fmt: skip

    def event(self, event: Event) -> None:
        if self.recorder is not None:
            self.recorder.event(event)
        log.info("%s: %s", event.kind, event.message)

    def requests(self) -> Requests:
        return Requests()


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs this process's rank; returns its exit code."""
    parser = argparse.ArgumentParser(prog="torchrun … -m raypp.train", description="Run one rank of a job without Ray.")
    parser.add_argument("--job", required=True, help="the job file")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C", help="override a key of the job")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    try:
        job = load_job(options.job, options.set).job
        return _run(job, seat_from_environment(job))
    except RayppError as error:
        if options.debug:
            raise
        print(error, file=sys.stderr)  # noqa: T201
        return error.exit_code


def _run(job: Job, seat: Seat) -> int:
    recorder = None
    if seat.rank == 0:
        recorder = RunRecorder(open_store(job.checkpoint.url), job.name, f"torchrun-{seat.attempt}")
    reporter = ConsoleReporter(recorder, job.train.steps)
    try:
        result = run_rank(job, seat, reporter)
        if seat.rank == 0:
            state = RunState.STOPPED if result.stopped else RunState.SUCCEEDED
            reporter.event(Event(state.lower(), f"after step {result.step}", attempt=seat.attempt, step=result.step))
    finally:
        if recorder is not None:
            recorder.close()
    return 0
