"""A run's machine in its store: from it another controller process leads on when one is killed.
Each write creates one more object, `NAME/machine/SPEC-000017.json`, if it is absent, so of two
processes that lead at the same time one notices. The newest object counts."""

import json
import threading
from dataclasses import asdict, dataclass

from raypp.control.machine import Machine
from raypp.errors import CheckpointError, Problem
from raypp.state.checkpoint.layout import machine_key, machine_version
from raypp.storage import AlreadyExists, ObjectStore
from raypp.untrusted.documents import Bounds, Count, parse_as

VERSION = 1
"""Goes up with each change of what is written."""
_KEPT = 8
_BOUNDS = Bounds()
_FIX = "`raypp submit JOB --resume` ends the ranks that are left and goes on from the newest checkpoint"


class MachineError(CheckpointError):
    """The machine that another process left cannot be used, so its ranks are not taken over."""


@dataclass(frozen=True)
class _Version:
    version: Count


@dataclass(frozen=True)
class _Written(_Version):
    """The content of an object. `writer`: the controller process."""

    writer: str
    machine: Machine


class MachineLog:
    """Writes the machine of a submission. `writer`: a name that no other controller process has."""

    def __init__(self, store: ObjectStore, run: str, writer: str) -> None:
        self._store = store
        self._run = run
        self._writer = writer
        self._number: int | None = None
        self._version = 0
        self._machine: Machine | None = None
        self._written: Machine | None = None
        self._lock = threading.Lock()
        self.overtaken = False
        """Another process leads the run: this one must not act any more."""

    def open(self, number: int) -> Machine | None:
        """Returns the machine that the submission's last controller left; None without one.
        `number`: of its spec. Raises MachineError: it is damaged, or of another version."""
        self._number = number
        keys = [info.key for info in self._store.list(f"{self._run}/machine/{number}-")]
        self._version = max((machine_version(self._run, number, key) or 0 for key in keys), default=0)
        return self._read(number, self._version).machine if self._version else None

    def put(self, machine: Machine) -> None:
        self._machine = machine

    def write(self) -> None:
        """Writes the machine if it has changed. Raises StoreError; call it again then."""
        with self._lock:  # the thread of the records, and before an attempt the leader
            machine, number = self._machine, self._number
            while machine is not None and number is not None and machine != self._written and not self.overtaken:
                document = asdict(_Written(VERSION, self._writer, machine))
                content = json.dumps(document, ensure_ascii=False).encode("utf-8", "replace")  # half surrogates
                try:
                    self._store.put(machine_key(self._run, number, self._version + 1), content, if_absent=True)
                    self._written = machine
                except AlreadyExists:  # perhaps by this process: a try that seemed to fail was stored
                    self.overtaken = self._read(number, self._version + 1).writer != self._writer
                self._version += 1
                if self._version > _KEPT:
                    self._store.delete([machine_key(self._run, number, self._version - _KEPT)])

    def _read(self, number: int, version: int) -> _Written:
        key = machine_key(self._run, number, version)
        data, place = self._store.get(key, 0, _BOUNDS.size + 1), f"{self._store.url}/{key}"
        kind = "what a controller had decided"
        found = parse_as(_Version, data, place, _BOUNDS, MachineError, _FIX, kind=kind, unknown="ignore").version
        if found != VERSION:
            fault = f"is of version {found}; this raypp reads version {VERSION}"
            raise MachineError(Problem(place, fault, f"use the raypp that wrote it; {_FIX}"))
        return parse_as(_Written, data, place, _BOUNDS, MachineError, _FIX, kind=kind)
