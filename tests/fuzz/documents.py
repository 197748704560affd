"""Documents of a run in its store, through every command that reads them."""

import contextlib
from collections.abc import Callable

from raypp.control.machine import Machine
from raypp.control.run_record import RunRecord
from raypp.errors import CheckpointError
from raypp.job.load import parse_job
from raypp.state.checkpoint.announce import read_announcement
from raypp.state.checkpoint.compatibility import check_resume
from raypp.state.checkpoint.run_spec import read_spec
from raypp.state.checkpoint.tensor_file import TensorEntry, encode_header
from raypp.state.memory.files import decode_control
from raypp.state.memory.slot import StoredSlot
from raypp.state.run_records.reader import RunReader
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


def _document(name: str, key: str, *commands: str, use: Callable[[DirectoryStore], object] = lambda _: None) -> None:
    """Makes a target of these commands, which read a document, after `use`."""

    @target(documents()[key], name=name)
    def run(data: bytes) -> None:
        with replaced(**{key: data}) as store:
            use(DirectoryStore(store))
            run_commands(store, commands)


def _recover(store: DirectoryStore) -> None:
    _record(store).recover_from_commits()


def _read_status(store: DirectoryStore) -> None:
    _record(store)._earlier_status(RunReader(store, NAME), Machine())


_document("commit", COMMIT, *_READ, "checkpoints list RUN", "checkpoints export RUN OUT", use=_recover)
_document("status", STATUS, "status RUN", "status RUN --json", "logs RUN", use=_read_status)
_document("history", HISTORY, "history RUN", "status RUN", "report RUN --out OUT")
_document("trace", TRACE, "timeline RUN --out OUT", "report RUN --out OUT")
_document("logs", LOGS, "logs RUN", "logs RUN --rank 1")


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


@target(documents()[EVENTS])
def events(data: bytes) -> None:
    with replaced(**{EVENTS: data}) as store:
        run_commands(store, ["events RUN", "events RUN --json", "report RUN --out OUT"])
        reader = RunReader(DirectoryStore(store), NAME)
        reader.evaluations()


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
