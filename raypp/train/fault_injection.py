"""Faults on purpose, for tests and `make chaos`: only when `RAYPP_FAULTS` is set in the rank's environment.

    RAYPP_FAULTS="kill@forward:rank=1,step=3; nan@backward:rank=0,step=5,attempt=2"

Each fault is `kind@moment`, then where and when: `rank` (else every rank), `step` (else the first time the moment
comes), `attempt` (1 when not given; 0: every one), `seconds` (of slow). A fault happens once in a seat; `slow` lasts
from its step on, `nan` and `spike` of a forward come in every forward of their step (of every step without one).

| moment | is |
|---|---|
| `rendezvous`, `build`, `load`, `finish` | that phase |
| `first_step`, `last_step` | the beginning of the attempt's first step, of the run's last |
| `data` | a step's rows are about to be read |
| `forward`, `backward` | the first forward, backward of a step |
| `p2p` | the rank is about to wait for a message |
| `collective` | it is about to enter the step's agreement |
| `optimizer` | before the update |
| `save` | a save is about to begin |
| `upload`, `commit` | this rank's part, the COMMIT, is about to be written: in the saver's thread |

| kind | does |
|---|---|
| `kill`, `term`, `freeze` | SIGKILL, SIGTERM, SIGSTOP to itself |
| `segfault`, `abort`, `bus` | dies of SIGSEGV, SIGABRT, SIGBUS |
| `exit` | leaves with code 7, without a word |
| `raise` | RuntimeError |
| `oom`, `host_oom` | torch.OutOfMemoryError, MemoryError |
| `disk_full` | OSError ENOSPC |
| `hang` | stands still for ever |
| `slow` | sleeps `seconds` before each of its forwards |
| `nan` | the output of its forward (moment forward), its gradients (backward), or a weight (optimizer) become NaN |
| `spike` | the loss it computes is multiplied by 1000, in what is reported and in the gradients |
| `corrupt` | one bit of one of its weights turns over, after the update (moment optimizer) |
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import signal
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from raypp.errors import JobError
from raypp.parallel.shard import local_part
from raypp.records import Event, Reporter, Requests, Seat, StepReport
from raypp.storage import ObjectStore

VARIABLE = "RAYPP_FAULTS"
KINDS = (
    "kill", "term", "freeze", "segfault", "abort", "bus", "exit", "raise", "oom", "host_oom", "disk_full", "hang",
    "slow", "nan", "spike", "corrupt",
)  # fmt: skip
MOMENTS = (
    "rendezvous", "build", "load", "first_step", "data", "collective", "forward", "backward", "p2p", "optimizer",
    "save", "upload", "commit", "last_step", "finish",
)  # fmt: skip
_NUMBERS = ("nan", "slow", "spike", "corrupt")
_FAULT = re.compile(r"(\w+)@(\w+)(?::(.*))?")
_ACTION = re.compile(r"\d+([FBIW])\d+( waits)?")


@dataclass(frozen=True)
class Fault:
    """One fault: what, at which moment, where and when."""

    kind: str
    moment: str
    rank: int | None = None
    step: int | None = None
    attempt: int = 1
    seconds: float = 0.5


def parse_faults(text: str) -> list[Fault]:
    """What `RAYPP_FAULTS` says.

    Raises:
        JobError: It says something else.
    """
    found = []
    for part in filter(None, (one.strip() for one in text.split(";"))):
        match = _FAULT.fullmatch(part)
        if match is None or match[1] not in KINDS or match[2] not in MOMENTS:
            raise JobError(f"{VARIABLE}: `{part}` is no kind@moment", f"kinds: {KINDS}; moments: {MOMENTS}")
        settings: dict[str, Any] = {}
        for setting in filter(None, (match[3] or "").split(",")):
            key, _, value = setting.strip().partition("=")
            if key not in ("rank", "step", "attempt", "seconds"):
                raise JobError(f"{VARIABLE}: `{setting}` in `{part}` means nothing", "rank, step, attempt or seconds")
            settings[key] = float(value) if key == "seconds" else int(value)
        found.append(Fault(match[1], match[2], **settings))
    return found


class Injection:
    """The faults of one rank in one seat.

    Args:
        faults: All that were asked for.
        last_step: The run's.
    """

    def __init__(self, faults: Iterable[Fault], seat: Seat, last_step: int) -> None:
        self._left = [
            fault for fault in faults if fault.rank in (None, seat.rank) and fault.attempt in (0, seat.attempt)
        ]
        self._last_step = last_step
        self._step = self._first = 0
        self._lock = threading.Lock()

    def phase(self, name: str, detail: str) -> None:
        """The rank says what it does next: some moments begin so."""
        first, _, rest = detail.partition(" ")
        if name == "step" and rest == "read":
            self._step = int(first)
            self._first = self._first or self._step
            if self._step == self._first:
                self.reach("first_step")
            if self._step == self._last_step:
                self.reach("last_step")
            self.reach("data")
        elif name == "step" and (action := _ACTION.fullmatch(detail)) is not None:
            self.reach("p2p" if action[2] else "forward" if action[1] == "F" else "backward")
        elif name == "step" and detail in ("agree", "update"):
            self.reach({"agree": "collective", "update": "optimizer"}[detail])
        elif name in ("rendezvous", "build", "load", "save", "finish"):
            self.reach(name)

    def reach(self, moment: str) -> None:
        """A moment has come."""
        for fault in self._due(moment, numbers=False):
            _do(fault)

    def _due(self, moment: str, *, numbers: bool) -> list[Fault]:
        with self._lock:
            due = [
                fault
                for fault in self._left
                if fault.moment == moment
                and (fault.kind in _NUMBERS) == numbers
                and (fault.step in (None, self._step) or (fault.kind == "slow" and (fault.step or 0) <= self._step))
            ]
            if not numbers:
                self._left = [fault for fault in self._left if fault not in due]
        return due

    # What changes numbers ---------------------------------------------------------------------------

    def watch(self, stages: Iterable[nn.Module]) -> None:
        """Puts itself into the stages' forwards."""
        for stage in stages:
            stage.register_forward_pre_hook(self._before_forward)
            stage.register_forward_hook(self._after_forward)

    def _before_forward(self, _stage: nn.Module, _inputs: Any) -> None:
        for fault in self._due("forward", numbers=True):
            if fault.kind == "slow":
                time.sleep(fault.seconds)

    def _after_forward(self, _stage: nn.Module, _inputs: Any, output: Any) -> Any:
        for fault in self._due("forward", numbers=True):
            if fault.kind == "nan" and isinstance(output, Tensor):
                return output * float("nan")
            if fault.kind == "spike" and isinstance(output, Tensor):
                return output * 1000.0
        return output

    def gradients(self, gradients: Iterable[Tensor]) -> None:
        """A step's gradients are there."""
        for fault in self._due("backward", numbers=True):
            if fault.kind == "nan":
                next(iter(gradients)).fill_(float("nan"))
                self._left.remove(fault)

    @torch.no_grad()
    def updated(self, stages: Iterable[nn.Module]) -> None:
        """A step's update is done."""
        for fault in self._due("optimizer", numbers=True):
            if fault.kind == "corrupt":
                weights = [local_part(parameter) for stage in stages for parameter in stage.parameters()]
                word = next(weight for weight in weights if weight.numel()).view(-1)[:1].view(torch.int32)
                word.bitwise_xor_(1)
                self._left.remove(fault)
            if fault.kind == "nan":
                next(iter(next(iter(stages)).parameters())).fill_(float("nan"))
                self._left.remove(fault)


class FaultyReporter:
    """A reporter through which faults come at the moments that a rank marks."""

    def __init__(self, reporter: Reporter, injection: Injection) -> None:
        self._reporter, self._injection = reporter, injection

    def phase(self, name: str, detail: str = "") -> None:
        self._reporter.phase(name, detail)
        self._injection.phase(name, detail)

    def step(self, report: StepReport) -> None:
        self._reporter.step(report)

    def event(self, event: Event) -> None:
        self._reporter.event(event)

    def requests(self) -> Requests:
        return self._reporter.requests()


class FaultyStore:
    """A store through which faults come when something is written."""

    def __init__(self, store: ObjectStore, injection: Injection) -> None:
        self._store, self._injection = store, injection

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)
        return self._before(method) if name in ("put", "put_stream") else method

    def _before(self, method: Any) -> Any:
        def write(key: str, *rest: Any, **more: Any) -> Any:
            self._injection.reach("commit" if key.endswith("/COMMIT") else "upload")
            return method(key, *rest, **more)

        return write


def injection_for(seat: Seat, last_step: int) -> Injection | None:
    """The faults that this process' environment asks for; None: none, as always outside of tests."""
    text = os.environ.get(VARIABLE)
    return Injection(parse_faults(text), seat, last_step) if text else None


def _do(fault: Fault) -> None:
    signals = {"kill": "SIGKILL", "term": "SIGTERM", "freeze": "SIGSTOP", "abort": "SIGABRT", "bus": "SIGBUS"}
    if fault.kind in signals:
        os.kill(os.getpid(), getattr(signal, signals[fault.kind]))
    elif fault.kind == "segfault":
        ctypes.string_at(0)
    elif fault.kind == "exit":
        os._exit(7)
    elif fault.kind == "raise":
        raise RuntimeError(f"injected at {fault.moment}")
    elif fault.kind == "oom":
        raise torch.OutOfMemoryError(f"injected at {fault.moment}: out of memory")
    elif fault.kind == "host_oom":
        raise MemoryError(f"injected at {fault.moment}")
    elif fault.kind == "disk_full":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), f"/injected/{fault.moment}")
    elif fault.kind == "hang":
        while True:
            time.sleep(3600)
