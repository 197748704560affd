"""The real rank with faults at exact moments, injected by itself or from outside:
`injected_faults:run_rank`.

The test writes a plan, a list of `Strike`s, into the directory `CHAOS_DIR` (set in
`resources.env`). A rank detects its moments from what it reports (phases and actions of the
schedule), from torch's hook before an optimizer step, and from wrapped functions: those that send a
save's bytes and its COMMIT, and the one that returns a step's gradients. The first strike of the
plan that has not fallen waits for its rank, moment and step. When they are reached, the rank
records the fault in `fallen-N` and triggers it: a real signal, an exception or a hang. For a fault
from outside (the controller dies, the store stops answering) the rank waits at that exact moment
until the test has applied it and has written `done-N`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

if "CHAOS_DIR" in os.environ:
    # Imports the real rank when a rank's process loads this module, before its life begins. If the
    # rank and `leave` start the import of torch in two threads at once, the process crashes.
    import raypp.rank.rank  # noqa: F401

_PATIENCE_S = 60.0
_FORWARD = re.compile(r"^\d+F[1-9]\d*$")
_BACKWARD = re.compile(r"^\d+[BI][1-9]\d*$")
START = ("rendezvous", "build", "load", "first step")
MOMENTS = (*START, "forward", "backward", "optimizer", "save", "commit", "committed", "last step", "finish")
"""Moments in the order in which a rank reaches them. `save`: this rank's bytes are about to be
sent, in the saver's thread. `commit`: COMMIT is about to be written. `committed`: it is written,
but not reported yet. `finish`: all steps are done."""
SIGNALS = {"kill": signal.SIGKILL, "segfault": signal.SIGSEGV, "freeze": signal.SIGSTOP}


@dataclass(frozen=True)
class Strike:
    """One fault.

    Attributes:
        number: Index in the plan.
        rank: The rank whose moment triggers the fault.
        moment: One of MOMENTS.
        kind: kill, segfault, freeze, raise, hang, nan. Empty if only something outside the ranks is
            hit.
        step: The earliest step the fault falls in (for moments of steps and saves).
        also: Ranks that are killed at the same instant.
        outside: controller, driver or store: what the test hits meanwhile.
    """

    number: int
    rank: int
    moment: str
    kind: str = ""
    step: int = 0
    also: tuple[int, ...] = ()
    outside: str = ""

    @property
    def ends_attempt(self) -> bool:
        return bool(self.kind)


def leave(seat: Any) -> None:
    from raypp.rank.rank import cut_connections

    cut_connections(seat.master_port)


def run_rank(decision: Any, seat: Any, reporter: Any) -> Any:
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    import raypp.state.checkpoint.save as saving
    from raypp.rank import rank
    from raypp.rank.optimizers.reduce import GradientReducer

    planned = PlannedFault(decision.job, seat)
    upload, commit, gradients = saving.upload_snapshot, saving.write_commit, GradientReducer.gradients

    def faulty_upload(*arguments: Any, **more: Any) -> Any:
        planned.at("save", arguments[3]["step"])
        return upload(*arguments, **more)

    def faulty_commit(store: Any, what: Any) -> None:
        planned.at("commit", what.step)
        commit(store, what)
        planned.at("committed", what.step)

    def faulty_gradients(reducer: Any) -> Any:
        found = gradients(reducer)
        if planned.poisoned:
            found[0].fill_(float("nan"))
        return found

    def before_update(*_: Any) -> None:
        planned.at("optimizer", planned.step)

    hook = register_optimizer_step_pre_hook(before_update)
    saving.upload_snapshot, saving.write_commit = faulty_upload, faulty_commit
    GradientReducer.gradients = faulty_gradients  # type: ignore[method-assign]
    try:
        return rank.run_rank(decision, seat, Witness(reporter, planned))
    finally:
        hook.remove()
        saving.upload_snapshot, saving.write_commit = upload, commit
        GradientReducer.gradients = gradients  # type: ignore[method-assign]


class Witness:
    """The rank's reporter. It sees every moment first."""

    def __init__(self, reporter: Any, planned: PlannedFault) -> None:
        self._reporter, self._fault = reporter, planned

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reporter, name)

    def phase(self, name: str, detail: str = "", reached: object = None) -> None:
        self._reporter.phase(name, detail)
        self._fault.sees(name, detail)


class PlannedFault:
    """The faults that the plan has for one rank of one attempt."""

    def __init__(self, job: Any, seat: Any) -> None:
        self._directory = Path(os.environ["CHAOS_DIR"])
        self._steps, self._seat = job.train.steps, seat
        self._plan = read_plan(self._directory)
        self._next = 0
        self._lock = threading.Lock()
        self.step = 0
        self._first: int | None = None
        self.poisoned = False
        put(self._directory / f"pid-{seat.rank}", {"pid": os.getpid()})

    def sees(self, phase: str, detail: str) -> None:
        if phase in ("rendezvous", "build", "load", "finish"):
            self.at(phase, self._steps if phase == "finish" else 0)
        elif phase == "step":
            number, _, rest = detail.partition(" ")
            if rest == "read":
                self.step = int(number)
                self._first = self._first or self.step
            elif _FORWARD.match(detail):
                if self.step == self._first:
                    self.at("first step", self.step)
                if self.step == self._steps:
                    self.at("last step", self.step)
                self.at("forward", self.step)
            elif _BACKWARD.match(detail):
                self.at("backward", self.step)

    def at(self, moment: str, step: int) -> None:
        """Handles the arrival of the rank at a moment: triggers the strike that waits for it."""
        with self._lock:
            strike = self._armed()
            if strike is None or (strike.rank, strike.moment) != (self._seat.rank, moment) or step < strike.step:
                return
            # Records know at most the last finished step. The strike falls in the step after it.
            fact = {"time": time.time(), "pid": os.getpid(), "attempt": self._seat.attempt, "step": step}
            if not put(self._directory / f"fallen-{strike.number}", fact | {"moment": moment, "in_step": self.step}):
                return
        self._fall(strike)

    def _armed(self) -> Strike | None:
        """Returns the next strike, once the attempt that the previous one ended is over."""
        while self._next < len(self._plan) and (before := self._fallen(self._next)) is not None:
            if self._plan[self._next].ends_attempt and before["attempt"] >= self._seat.attempt:
                return None
            self._next += 1
        return self._plan[self._next] if self._next < len(self._plan) else None

    def _fallen(self, number: int) -> dict[str, Any] | None:
        return read(self._directory / f"fallen-{number}")

    def _fall(self, strike: Strike) -> None:
        if strike.outside:
            end = time.monotonic() + _PATIENCE_S
            while time.monotonic() < end and not (self._directory / f"done-{strike.number}").exists():
                time.sleep(0.005)
        for other in strike.also:
            found = read(self._directory / f"pid-{other}")
            if found is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(found["pid"], signal.SIGKILL)
        match strike.kind:
            case "kill" | "segfault" | "freeze":
                os.kill(os.getpid(), SIGNALS[strike.kind])
                time.sleep(1.0 if strike.kind != "freeze" else 0.0)
            case "raise":
                raise ValueError(f"strike {strike.number} at {strike.moment}")
            case "hang":
                while True:
                    time.sleep(0.1)
            case "nan":
                self.poisoned = True  # sharded gradients cannot be accessed while backwards are running


def write_plan(directory: Path, strikes: list[Strike]) -> None:
    directory.mkdir(parents=True)
    (directory / "plan.json").write_text(json.dumps([asdict(strike) for strike in strikes]))


def read_plan(directory: Path) -> list[Strike]:
    rows = json.loads((directory / "plan.json").read_text())
    return [Strike(**row | {"also": tuple(row["also"])}) for row in rows]


def put(path: Path, fact: dict[str, Any]) -> bool:
    """Writes a file atomically. Writes `fallen-N` only once: returns False if it exists."""
    fresh = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}")
    fresh.write_text(json.dumps(fact))
    if path.name.startswith("pid-"):
        fresh.replace(path)
        return True
    try:
        os.link(fresh, path)
    except FileExistsError:
        return False
    finally:
        fresh.unlink()
    return True


def read(path: Path) -> dict[str, Any] | None:
    try:
        return dict(json.loads(path.read_text()))
    except FileNotFoundError:
        return None
