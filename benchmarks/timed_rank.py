"""Times raypp's rank runtime under torchrun, step by step: the `run_rank` that workers call."""

import argparse
import json
import os
import resource
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.paced import sleep_instead
from benchmarks.sizes import MICROBATCHES, ROWS, SEQ_LEN, model_options
from benchmarks.turns import Gate
from raypp.job.document import Document
from raypp.job.job import Job
from raypp.job.job_file import apply_overrides
from raypp.job.load import parse_job
from raypp.planning.decide import decide
from raypp.rank.device_check import facts_here
from raypp.rank.own_seat import seat_from_environment
from raypp.rank.rank import run_rank
from raypp.records import Event, Requests, StepReport
from raypp.stages.parallel import apply
from raypp.stages.pipeline import runtime
from raypp.stages.pipeline.wire import SumStart


class StepTimer:
    """Records wall and CPU time when a rank starts to read a step; on rank 0, each step's parts.
    `stop_after`: steps after which rank 0 stops the run without a checkpoint; 0: never."""

    def __init__(self, stop_after: int = 0) -> None:
        self._stop_after = stop_after
        self.wall: list[float] = []
        self.cpu: list[float] = []
        self.parts: list[dict[str, float]] = []
        self.tokens: list[int] = []
        self.events: list[dict[str, Any]] = []
        self._gate = Gate()

    def phase(self, name: str, detail: str = "", reached: object = None) -> None:
        if name == "finish" or detail.endswith("read"):
            self._gate.step_begins(lambda: {"parts": self.parts[-1] if self.parts else {}, "events": self.events})
            self.wall.append(time.perf_counter())
            self.cpu.append(time.process_time())

    def step(self, report: StepReport) -> None:
        self.parts.append(dict(report.parts_s))
        self.tokens.append(report.tokens)

    def event(self, event: Event) -> None:
        self.events.append({"kind": event.kind, "message": event.message, "details": event.details})

    def requests(self) -> Requests:
        return Requests(stop=bool(self._stop_after) and len(self.parts) >= self._stop_after, save_before_stop=False)


def job_of(settings: Sequence[str], *, world: int, steps: int, cut: str = "", url: str = "/tmp/unused") -> Job:
    """Returns the benchmark's job, with keys set."""
    layers = [int(part) for part in cut.split(",")] if cut else None
    document: dict[str, Any] = {
        "name": "bench",
        "model": model_options().model_dump(),
        "data": {"kind": "synthetic", "document_len": [SEQ_LEN, SEQ_LEN], "seq_len": SEQ_LEN, "num_documents": 500},
        "mesh": {"pp": world},
        "pipeline": {"schedule": "1f1b", "microbatches": MICROBATCHES, "layers_per_stage": layers},
        "train": {"steps": steps, "micro_batch_size": ROWS},
        "checkpoint": {"url": url, "every_steps": 0},
    }
    written = Document(document)
    apply_overrides(written, settings)
    assert not written.problems, written.problems
    return parse_job(document)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--cut", default="")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C", help="override a key of the job")
    parser.add_argument("--pace", type=float, help="sleep this many seconds per layer (benchmarks.paced)")
    parser.add_argument("--sums", choices=("after", "at-once"), help="start sums over replicas at another time")
    parser.add_argument("--no-save", action="store_true", help="stop after the steps without a checkpoint")
    arguments = parser.parse_args()
    if arguments.pace:
        sleep_instead(arguments.pace)
    if arguments.sums == "after":  # the last backward: FSDP's own
        apply._replica_sums = lambda *_: None
    elif arguments.sums == "at-once":  # in each stage's last backward, though its gradient is still to be sent
        runtime.sum_start = lambda actions, stages: SumStart(frozenset(), -1, waits=False)  # type: ignore[attr-defined]
    url = os.environ.get("BENCH_STORE") or tempfile.mkdtemp()
    world = int(os.environ["WORLD_SIZE"])
    steps = arguments.steps + arguments.no_save  # the run is stopped before its last step, which saves
    job = job_of(arguments.set, world=world, steps=steps, cut=arguments.cut, url=url)
    timer = StepTimer(arguments.steps if arguments.no_save else 0)
    seat = seat_from_environment(job)
    run_rank(decide(job, facts_here(seat)), seat, timer)
    wall = [b - a for a, b in zip(timer.wall, timer.wall[1:], strict=False)][: arguments.steps]
    cpu = [b - a for a, b in zip(timer.cpu, timer.cpu[1:], strict=False)][: arguments.steps]
    if os.environ.get("BENCH_OUT"):
        peak = used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        if seat.device == "cuda":
            peak, used = torch.cuda.max_memory_reserved() / 2**20, torch.cuda.max_memory_allocated() / 2**20
        figures = {"wall": wall, "cpu": cpu, "parts": timer.parts, "tokens": timer.tokens}
        figures |= {"peak_mib": peak, "used_mib": used}
        Path(f"{os.environ['BENCH_OUT']}.{seat.rank}").write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
