"""Injects faults, for tests and `make chaos`; only if `RAYPP_FAULTS` is set for the rank.

    RAYPP_FAULTS="kill@forward:rank=1,step=3; nan@backward:rank=0,step=5,attempt=2"

docs/reliability.md has the kinds, the moments and the settings.
"""

import ctypes
import errno
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from raypp.errors import JobError
from raypp.records import Reporter, Seat
from raypp.stages.parallel.shard import local_part
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
_MOMENTS = {"agree": "collective", "update": "optimizer"}
_ACTION = re.compile(r"\d+([FBIW])\d+( waits)?")


@dataclass(frozen=True)
class Fault:
    """One fault: its kind, its moment, and the rank, step and attempt it applies to."""

    kind: str
    moment: str
    rank: int | None = None
    step: int | None = None
    attempt: int = 1
    seconds: float = 0.5


def parse_faults(text: str) -> list[Fault]:
    """Parses the value of `RAYPP_FAULTS`. Raises JobError: it has not the documented form."""
    faults = []
    for part in filter(None, (one.strip() for one in text.split(";"))):
        match = _FAULT.fullmatch(part)
        if match is None or match[1] not in KINDS or match[2] not in MOMENTS:
            raise JobError(f"{VARIABLE}: `{part}` is not kind@moment", f"kinds: {KINDS}; moments: {MOMENTS}")
        settings: dict[str, Any] = {}
        for setting in filter(None, (match[3] or "").split(",")):
            key, _, value = setting.strip().partition("=")
            if key not in ("rank", "step", "attempt", "seconds"):
                raise JobError(f"{VARIABLE}: unknown setting `{setting}` in `{part}`", "rank, step, attempt or seconds")
            settings[key] = float(value) if key == "seconds" else int(value)
        faults.append(Fault(match[1], match[2], **settings))
    return faults


class Injection:
    """The faults of one rank in one seat."""

    def __init__(self, faults: Iterable[Fault], seat: Seat, last_step: int) -> None:
        self._left = [one for one in faults if one.rank in (None, seat.rank) and one.attempt in (0, seat.attempt)]
        self._last_step = last_step
        self._step = self._first = 0
        self._lock = threading.Lock()

    def phase(self, name: str, detail: str) -> None:
        """Takes the phase this rank begins, and injects the faults of the moment it stands for."""
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
        elif name == "step" and (moment := _MOMENTS.get(detail.removeprefix("replica "))):
            self.reach(moment)
        elif name in ("rendezvous", "build", "load", "save", "finish"):
            self.reach(name)

    def reach(self, moment: str) -> None:
        """Injects the faults that are due at `moment`, except those that change numbers."""
        for fault in self._due(moment, numbers=False):
            _do(fault)

    def reporter(self, reporter: Reporter) -> Reporter:
        """Returns a reporter that injects faults at the moments that a rank marks."""
        return cast(Reporter, _FaultyReporter(reporter, self))

    def store(self, store: ObjectStore) -> ObjectStore:
        """Returns a store that injects faults before writes."""
        return cast(ObjectStore, _FaultyStore(store, self))

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

    # Faults that change numbers -----------------------------------------------------------------

    def watch(self, stages: Iterable[nn.Module]) -> None:
        """Registers forward hooks on the stages."""
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
        """Injects faults into a step's gradients, local parts `[...]`, in place."""
        for fault in self._due("backward", numbers=True):
            if fault.kind == "nan":
                next(iter(gradients)).fill_(float("nan"))
                self._left.remove(fault)

    @torch.no_grad()
    def updated(self, stages: Iterable[nn.Module]) -> None:
        """Injects faults into the weights after a step's update."""
        for fault in self._due("optimizer", numbers=True):
            if fault.kind == "corrupt":
                weights = [local_part(parameter) for stage in stages for parameter in stage.parameters()]
                word = next(weight for weight in weights if weight.numel()).view(-1)[:1].view(torch.int32)
                word.bitwise_xor_(1)
                self._left.remove(fault)
            if fault.kind == "nan":
                next(iter(next(iter(stages)).parameters())).fill_(float("nan"))
                self._left.remove(fault)


class _FaultyReporter:
    def __init__(self, reporter: Reporter, injection: Injection) -> None:
        self._reporter, self._injection = reporter, injection

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reporter, name)

    def phase(self, name: str, detail: str = "", reached: Callable[[], bool] | None = None) -> None:
        self._reporter.phase(name, detail, reached)
        self._injection.phase(name, detail)


class _FaultyStore:
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
