"""A rank without torch that does not train: it takes steps, commits, and fails on command.

The ranks of a run share a directory (`STAND_IN_DIR` in `resources.env`). Rank 0 writes its progress
there, `commit` holds the newest committed step, and `over-N` ends attempt N. `STAND_IN_FAULT` is
`kind:rank:step:times`. Every step adds a line to `taken`, so a repeated step is visible. The kind
`stall` makes all ranks wait in a sum, whatever the rank.
`STAND_IN_HOLD` is `step:attempt`: from this attempt on, that step is not taken before the file
`go` exists.
"""

import ctypes
import errno
import os
import time
from pathlib import Path

from raypp.job.job import Job
from raypp.planning.decision import Decision
from raypp.records import Event, RankResult, Reporter, Seat, StepReport

_STEP_S = 0.05
"""Of a step, unless `STAND_IN_STEP_S` says so."""
_VICTIM_S = 30.0
_left: set[int] = set()
"""Attempts that this process was asked to leave."""


def leave(seat: Seat) -> None:
    """Stands in for the function that closes a real rank's connections."""
    _left.add(seat.attempt)


def run_rank(decision: Decision, seat: Seat, reporter: Reporter) -> RankResult:
    job = decision.job
    place = Path(os.environ["STAND_IN_DIR"])
    place.mkdir(parents=True, exist_ok=True)
    print(f"hello from {seat.label}", flush=True)
    os.write(2, f"native words of {seat.label}\n".encode())
    (place / f"environment-{seat.rank}").write_text("\n".join(f"{key}={value}" for key, value in os.environ.items()))
    return _lead(job, seat, reporter, place) if seat.rank == 0 else _attend(job, seat, reporter, place)


def _lead(job: Job, seat: Seat, reporter: Reporter, place: Path) -> RankResult:
    committed = _read(place / "commit")
    step, stopped, step_s = committed, False, float(os.environ.get("STAND_IN_STEP_S", _STEP_S))
    for old in range(max(1, committed - 20), committed + 1):  # like a checkpoint, which holds the newest reports
        reporter.step(StepReport(old, 1.0 / old, 1.0, 10, 10, step_s, 10 / step_s, seat.attempt - 1))
    while step < job.train.steps and not stopped:
        _stay(seat)
        requests = reporter.requests()
        stopped = requests.stop
        if not stopped:
            step += 1
            reporter.phase("step", str(step))
            _hold(seat, step, reporter, place)
            _write(place / "step", step)
            time.sleep(step_s)
            with (place / "taken").open("a") as taken:
                taken.write(f"{seat.attempt} {step}\n")
            _fault(seat, step, place, reporter)
            if _faulty_rank(step, seat.attempt) not in (None, seat.rank):
                _wait_for_the_end(seat)  # like a real rank, which waits for a lost peer until it is ended
            reporter.step(StepReport(step, 1.0 / step, 1.0, 10, 10, step_s, 10 / step_s, seat.attempt))
        due = job.checkpoint.every_steps and step % job.checkpoint.every_steps == 0
        if step > committed and (
            requests.save or due or step == job.train.steps or (stopped and requests.save_before_stop)
        ):
            committed = step
            _write(place / "commit", step)
            reporter.event(Event("committed", f"step {step}", attempt=seat.attempt, step=step))
    _write(place / f"over-{seat.attempt}", step)
    return RankResult(0, step, stopped, committed)


def _attend(job: Job, seat: Seat, reporter: Reporter, place: Path) -> RankResult:
    over = place / f"over-{seat.attempt}"
    while not over.exists():
        _stay(seat)
        step = _read(place / "step")
        reporter.phase("step", str(step))
        reporter.requests()
        _fault(seat, step, place, reporter)
        time.sleep(0.02)
    step = _read(over)
    return RankResult(seat.rank, step, step < job.train.steps, None)


def _hold(seat: Seat, step: int, reporter: Reporter, place: Path) -> None:
    looks = 0
    at, attempt = map(int, os.environ.get("STAND_IN_HOLD", "0:1").split(":"))
    while step == at and seat.attempt >= attempt and not (place / "go").exists():
        _stay(seat)
        looks += 1
        reporter.phase("step", f"{step}, held {looks}")  # a rank whose phase stays the same hangs
        time.sleep(0.02)


def _stay(seat: Seat) -> None:
    if seat.attempt in _left:
        raise RuntimeError("told to leave")


def _wait_for_the_end(seat: Seat) -> None:
    end = time.monotonic() + _VICTIM_S
    while time.monotonic() < end:
        _stay(seat)
        time.sleep(0.02)


def _faulty_rank(step: int, attempt: int) -> int | None:
    """Returns the rank that must fail at this step of this attempt, or None."""
    if "STAND_IN_FAULT" not in os.environ:
        return None
    _, rank, at, times = os.environ["STAND_IN_FAULT"].split(":")
    return int(rank) if step == int(at) and attempt <= int(times) else None


def _fault(seat: Seat, step: int, place: Path, reporter: Reporter) -> None:
    faulty, kind = _faulty_rank(step, seat.attempt), os.environ.get("STAND_IN_FAULT", "").partition(":")[0]
    if kind == "stall" and faulty is not None:
        reporter.phase("step", "sum")
        _wait_for_the_end(seat)
    if faulty != seat.rank:
        return
    if kind == "raise":
        raise ValueError("the sun is too bright")
    if kind == "exit":
        os._exit(7)
    if kind == "say":
        print("my key is", os.environ["WANDB_API_KEY"], flush=True)
        raise RuntimeError(f"refused: {os.environ['WANDB_API_KEY']}")
    if kind == "segfault":
        ctypes.string_at(0)
    if kind == "full":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/mnt/full")


def _write(path: Path, step: int) -> None:
    """Writes the file atomically, because other processes read it at any time."""
    fresh = path.with_suffix(".new")
    fresh.write_text(str(step))
    fresh.replace(path)


def _read(path: Path) -> int:
    try:
        return int(path.read_text() or 0)
    except FileNotFoundError:
        return 0
