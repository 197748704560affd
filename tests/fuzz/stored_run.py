"""A small run in a directory, one document of which is replaced, and the commands that read it."""

import atexit
import contextlib
import hashlib
import io
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import click

from raypp.cli.main import cli
from raypp.errors import RayppError
from raypp.job.load import job_document, parse_job
from raypp.records import Coordinates, Event, RunState, StepReport
from raypp.state.checkpoint.commit import Commit, ObjectRecord
from raypp.state.checkpoint.layout import attempt_key, commit_key, rank_key
from raypp.state.checkpoint.tensor_file import TensorEntry, encode_header
from raypp.state.hf.names import model_tensors
from raypp.state.run_records.json_lines import LogLine, document, event_line, log_line, step_line
from raypp.state.run_records.status import RankStatus, RunStatus
from raypp.state.run_records.trace import RankTrace, Span

NAME = "run"
STEPS = (1, 2)
STATUS, SPEC = f"{NAME}/status.json", f"{NAME}/spec.json"
HISTORY, EVENTS, LOGS = (f"{NAME}/{folder}/a1-00001.jsonl" for folder in ("history", "events", "logs"))
COMMIT = commit_key(NAME, STEPS[-1])
OBJECT = rank_key(NAME, STEPS[-1], 1, 1)
TRACE = f"{NAME}/traces/a1-s00000001/rank-00001.json"
_SIZES = {"num_layers": 1, "hidden_size": 8, "num_heads": 2, "num_kv_heads": 1, "ffn_size": 8, "vocab_size": 16}


@cache
def documents() -> dict[str, bytes]:
    job = parse_job({"name": NAME, "model": _SIZES, "data": {"kind": "synthetic", "seq_len": 32}})
    made = {SPEC: json.dumps(job_document(job)).encode(), attempt_key(NAME, 1): b'{"attempt": 1}'}
    shapes = model_tensors(job.model)
    for step in STEPS:
        records = []
        for rank in range(2):  # each holds half of the rows
            entries, size = [], 0
            for name, (rows, *more) in [*shapes.items(), ("optim/model.norm.weight/step", (2,))]:
                shape = (rows // 2, *more)
                count = 4 * rows // 2
                for length in more:
                    count *= length
                offset = (rank * rows // 2, *(0 for _ in more))
                entries.append(TensorEntry(name, "F32", shape, size, size + count, (rows, *more), offset))
                size += count
            data = bytes(index % 7 for index in range(size))
            header = encode_header(entries, memoryview(data), {"run": NAME, "step": step, "attempt": 1, "rank": rank})
            key = rank_key(NAME, step, 1, rank)
            made[key] = header + data
            records.append(record_of(key, rank, made[key]))
        position = {"epoch": 0, "block": 0, "row": 3, "data": "0123"}
        extra = {"data_position": position, "recent_steps": []}
        commit = Commit(
            NAME, step, 1, {"pp": 1, "fsdp": 2}, job_document(job), extra, tuple(records), 1.5e9 + step, "0" * 16
        )
        made[commit_key(NAME, step)] = commit.to_bytes()
    ranks = tuple(RankStatus(rank, Coordinates(fsdp=rank), "node", 100 + rank, "done") for rank in range(2))
    status = RunStatus(NAME, RunState.SUCCEEDED, 2, 2, 0.5, 1e3, 1, 0, "s3://b/run/step-2", {"pp": 1, "fsdp": 2}, ranks)
    made[STATUS] = document(replace(status, updated_at=1.6e9).as_dict())
    reports = [StepReport(step, 1 / step, 0.1, 64, 32, 0.2, 320.0, 1, 1e-3, {"data": 0.1}) for step in STEPS]
    made[HISTORY] = b"".join(step_line(report, 1.5e9 + report.step) for report in reports)
    details = {
        "submitted": {"submission_id": "job-1"},
        "device_chosen": {"device": "cpu"},
        "seated": {"coordinates": {"pp": 0}, "pid": 100, "label": "pp0"},
        "evaluated": {"loss": 0.5, "tokens": 64, "seconds": 0.1},
        "rank_failed": {"kind": "oom", "cause": "killed", "pid": 100, "label": "pp0", "evidence": ""},
        "reshaped": {"to": {"pp": 1, "dp_replicate": 1, "fsdp": 1, "cp": 1, "tp": 1, "ep": 1, "microbatches": 2}},
        "stop_requested": {"save": True},
        "failed": {"exit_code": 1},
    }
    made[EVENTS] = b"".join(
        event_line(Event(kind, f"it is {kind}", 1.5e9 + index, 1, 1, 0, "node", known))
        for index, (kind, known) in enumerate(details.items())
    )
    for rank in range(2):
        spans = (
            *(Span(kind, at, 0.5, 1, 0, 0) for at, kind in enumerate(("wait F", "F", "B", "send B"))),
            *(Span(kind, 0.0, 4.0, 1) for kind in ("pipeline", "step")),
        )
        part = RankTrace(
            NAME, 1, 1, 1, rank, 2, f"pp0-fsdp{rank}", Coordinates(fsdp=rank), "n", "cpu", 1e9, 1e-4, spans
        )
        made[part.key()] = part.to_bytes()
    made[LOGS] = b"".join(log_line(LogLine(f"line {index}", index, "pp0", 1, "out", 1.5e9)) for index in range(3))
    return made


def record_of(key: str, rank: int, data: bytes) -> ObjectRecord:
    """Returns what COMMIT says about an object of these bytes, whatever they are."""
    header = data[: min(len(data), 8 + int.from_bytes(data[:8], "little"))]
    sums = (hashlib.sha256(part).hexdigest() for part in (data, header))
    return ObjectRecord(key, len(data), next(sums), rank, len(header), next(sums))


def commit_with(key: str, data: bytes) -> bytes:
    """Returns the newest COMMIT, which names these bytes as those of an object."""
    commit = Commit.from_bytes(documents()[COMMIT], COMMIT)
    records = tuple(record_of(key, one.rank, data) if one.key == key else one for one in commit.objects)
    return replace(commit, objects=records).to_bytes()


@contextlib.contextmanager
def replaced(**changed: bytes) -> Iterator[Path]:
    """Yields the directory of a store in which some documents, by their keys, are replaced."""
    folder = _store()
    try:
        for key, data in changed.items():
            (folder / key).write_bytes(data)
        yield folder
    finally:
        for key in changed:
            (folder / key).write_bytes(documents()[key])


def run_commands(folder: Path, commands: Sequence[str]) -> None:
    """Runs commands of raypp; RUN stands for the run, OUT for an empty folder. Raises the
    RayppError of the last one that failed; the others have run, too."""
    refused: RayppError | None = None
    with tempfile.TemporaryDirectory(dir=_memory()) as out:
        for number, command in enumerate(commands):
            words = [
                word.replace("RUN", f"{folder}/{NAME}").replace("OUT", f"{out}/{number}") for word in command.split()
            ]
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                try:
                    cli.main(words, prog_name="raypp", standalone_mode=False)
                except RayppError as error:
                    refused = error
                except (click.ClickException, SystemExit):
                    pass
    if refused is not None:
        raise refused


@cache
def _store() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="raypp-fuzz-", dir=_memory()))
    owner = os.getpid()
    atexit.register(lambda: os.getpid() == owner and shutil.rmtree(folder, ignore_errors=True))
    os.environ["RAYPP_HOME"] = str(folder / "home")
    os.environ.pop("RAYPP_ADDRESS", None)
    for key, data in documents().items():
        path = folder / "store" / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder / "store"


def _memory() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
