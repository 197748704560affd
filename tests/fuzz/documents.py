"""Documents of a run in its store, through every command that reads them."""

from __future__ import annotations

import contextlib

from raypp.checkpoint.announce import read_announcement
from raypp.checkpoint.compatibility import check_resume
from raypp.checkpoint.run_spec import read_spec
from raypp.checkpoint.tensor_file import TensorEntry, encode_header
from raypp.control.machine import Machine
from raypp.control.run_record import RunRecord
from raypp.errors import CheckpointError
from raypp.memory.files import decode_control
from raypp.memory.slot import StoredSlot
from raypp.observe.reader import RunReader
from raypp.spec.load import parse_job
from raypp.storage.directory import DirectoryStore
from raypp.untrusted.documents import parse_json
from tests.fuzz import target
from tests.fuzz.stored_run import (
    COMMIT,
    EVENTS,
    HISTORY,
    LOGS,
    NAME,
    OBJECT,
    SPEC,
    STATUS,
    TRACE,
    commit_with,
    documents,
    replaced,
    run_commands,
)

_READ = ("checkpoints show RUN", "checkpoints show RUN/step-2 --json", "checkpoints verify RUN --json")
_ENTRY = TensorEntry("w", "F32", (2, 3), 0, 24, (4, 3), (2, 0))
_TAIL = encode_header([_ENTRY], memoryview(bytes(24)), {}) + (
    b'{"data_position":{"epoch":0,"block":1,"row":2,"data":"01"},"recent_steps":[]}'
)
_HEADER = _TAIL.index(b'{"data_position"')
_CONTROL = (
    b'{"run":"run","life":"0123456789ab","job":"01","attempt":1,"rank":0,"committed":-1,"keeper":[4,1.5],"format":3,'
    b'"layout":"02","mesh":[1,1,1,1],"objects":[[0,24,9]],'
    b'"complete":true,"step":3,"data_size":24,"data_crc":7,"tail_size":9,"tail_crc":8}'
)


@target(b'{"a": [1, 2.5, "x"], "b": null}', b"[]")
def json(data: bytes) -> None:
    parse_json(data, "place")


@target(documents()[COMMIT])
def commit(data: bytes) -> None:
    with replaced(**{COMMIT: data}) as store:
        _record(DirectoryStore(store)).recover_from_commits()
        run_commands(store, [*_READ, "checkpoints list RUN", "checkpoints export RUN OUT"])


@target(documents()[OBJECT])
def header(data: bytes) -> None:
    changed = {OBJECT: data, COMMIT: commit_with(OBJECT, data)}
    with replaced(**changed) as store:
        run_commands(store, [*_READ, "checkpoints diff RUN/step-2 RUN/step-1", "checkpoints export RUN/step-2 OUT"])


@target(documents()[SPEC])
def spec(data: bytes) -> None:
    with replaced(**{SPEC: data}) as store:
        new = parse_job({"name": NAME, "data": {"kind": "synthetic"}})
        with contextlib.suppress(CheckpointError):
            check_resume(read_spec(DirectoryStore(store), NAME), new)
        run_commands(
            store,
            ["checkpoints prune RUN --dry-run", "checkpoints export RUN OUT", "status RUN", "report RUN --out OUT"],
        )


@target(documents()[STATUS])
def status(data: bytes) -> None:
    with replaced(**{STATUS: data}) as store:
        _record(DirectoryStore(store))._earlier_status(RunReader(DirectoryStore(store), NAME), Machine())
        run_commands(store, ["status RUN", "status RUN --json", "logs RUN"])


@target(documents()[HISTORY])
def history(data: bytes) -> None:
    with replaced(**{HISTORY: data}) as store:
        run_commands(store, ["history RUN", "status RUN", "report RUN --out OUT"])


@target(documents()[EVENTS])
def events(data: bytes) -> None:
    with replaced(**{EVENTS: data}) as store:
        run_commands(store, ["events RUN", "events RUN --json", "report RUN --out OUT"])
        reader = RunReader(DirectoryStore(store), NAME)
        reader.evaluations()


@target(documents()[TRACE])
def trace(data: bytes) -> None:
    with replaced(**{TRACE: data}) as store:
        run_commands(store, ["timeline RUN --out OUT", "report RUN --out OUT"])


@target(documents()[LOGS])
def logs(data: bytes) -> None:
    with replaced(**{LOGS: data}) as store:
        run_commands(store, ["logs RUN", "logs RUN --rank 1"])


@target(
    b'{"object": null, "facts": {"stall_s": 0.1, "upload_s": 0.2}}', b'{"error": "no"}', b'{"committed": true}',
    b'{"object": {"key": "k", "size": 9, "sha256": "", "rank": 0}, "facts": {"stall_s": 0.1, "upload_s": 0.2}}',
)  # fmt: skip
def announcement(data: bytes) -> None:
    read_announcement(data, 3, 1)


@target(_CONTROL)
def memory_control(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        decode_control(data)


@target(_TAIL)
def memory_tail(data: bytes) -> None:
    with contextlib.suppress(CheckpointError):
        StoredSlot({"rank": 0, "step": 3, "data_size": 24, "objects": [(0, 24, _HEADER)]}, data)


def _record(store: DirectoryStore) -> RunRecord:
    class Unwritten(RunRecord):
        """Neither writes nor starts the thread that does."""

        def __init__(self) -> None:
            self._store, self._job = store, parse_job({"name": NAME, "data": {"kind": "synthetic"}})

        def event(self, event: object) -> None: ...

        def add_step(self, report: object, reported_in: int = 0) -> bool:
            return True

        def _say(self, text: str) -> None: ...

    return Unwritten()
