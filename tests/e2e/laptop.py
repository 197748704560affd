"""A user's laptop: the `raypp` command with its own embedded cluster, and what can be observed from
outside.

Tests act only through the command line, in separate processes. They observe only what an outsider
can: process titles, the dashboard's HTTP API, and the objects in the store.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import yaml
from actor_names import without_digest
from programs import run_program
from safetensors.numpy import load as load_tensors

from raypp.control.clusters.dashboard import Dashboard, DashboardError
from raypp.control.clusters.seaweed import SeaweedServer
from raypp.errors import UnreachableError
from raypp.state.checkpoint.commit import list_checkpoints, read_commit
from raypp.state.run_records.reader import RunReader
from raypp.storage import ObjectStore
from raypp.storage.directory import DirectoryStore

REPOSITORY = Path(__file__).parents[2]
TEXT = REPOSITORY / "jobs" / "data" / "kjv-new-testament.txt"
RAYPP = str(Path(sys.executable).parent / "raypp")
STEPS = 40
EVERY = 5
_PATIENCE_S = 240.0  # on a loaded machine a run takes minutes to start
_START_S = 500.0  # and a head that Ray gives up is started once more


@dataclass(frozen=True)
class Answer:
    code: int
    out: str
    err: str

    def json(self) -> Any:
        """Parses the last line of standard output, which must be one JSON value."""
        return json.loads(self.out.rstrip("\n").rpartition("\n")[2])

    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]


@dataclass
class Laptop:
    """The embedded cluster of a temporary RAYPP_HOME."""

    directory: Path
    environment: dict[str, str]
    state: dict[str, Any]
    names: set[str] = field(default_factory=set)

    @classmethod
    def up(cls, directory: Path, cpus: int) -> Laptop:
        environment = bare_environment() | {"RAYPP_HOME": str(directory / "home")}
        laptop = cls(directory, environment, {})
        text = "\n\n".join(TEXT.read_text().split("\n\n")[:600])
        (directory / "words.txt").write_text(text)
        answer = laptop.raypp("local", "up", "--cpus", str(cpus), timeout=_START_S)
        assert answer.code == 0, answer
        laptop.state = json.loads((directory / "home" / "local" / "state.json").read_text())
        return laptop

    def down(self) -> list[str]:
        """Ends the cluster. Returns what is left of it despite that."""
        answer = self.raypp("local", "down", "--delete-data", "--yes")
        wait_for(lambda: not self.processes(), "", patience_s=60, fail=False)
        left = [] if answer.code == 0 else [f"`raypp local down` left with {answer}"]
        left += [f"process {one.pid}: {' '.join(one.cmdline())[:200]}" for one in self.processes()]
        left += [path for path in (self.state["ray_dir"], str(self.directory / "home/local/s3")) if Path(path).exists()]
        left += [str(path) for port in self.state["s3"]["ports"] for path in Path("/tmp").glob(f"seaweedfs-*-{port}.*")]
        return left

    def processes(self) -> list[psutil.Process]:
        """Returns the living processes that mention this home directory or this Ray session."""
        marks = (str(self.directory), self.state["ray_dir"])
        found = []
        for one in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if one.pid == os.getpid() or one.status() == psutil.STATUS_ZOMBIE:
                    continue
                words = [*one.cmdline(), *one.environ().values()]
                if any(mark in word for mark in marks for word in words):
                    found.append(one)
        return found

    # Commands -----------------------------------------------------------------------------------

    def raypp(
        self, *arguments: str, environment: dict[str, str] | None = None, timeout: float = 300, cwd: Path | None = None
    ) -> Answer:
        environment = self.environment | (environment or {})
        done = run_program(RAYPP, *arguments, code=None, env=environment, timeout=timeout, cwd=cwd or self.directory)
        return Answer(done.returncode, done.stdout, done.stderr)

    def popen(self, *arguments: str) -> subprocess.Popen[str]:
        out: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen([RAYPP, *arguments], env=self.environment, cwd=self.directory, **out)

    def job(self, name: str, **changes: Any) -> Path:
        """Writes a small job. `changes` are sections, or keys with `__` in place of the dot."""
        self.names.add(name)
        document: dict[str, Any] = {
            "name": name,
            "model": {"num_layers": 4, "hidden_size": 32, "num_heads": 2, "ffn_size": 64, "vocab_size": 320},
            "data": {"kind": "text", "path": str(self.directory / "words.txt"), "seq_len": 64},
            "mesh": {"pp": 2},
            "pipeline": {"schedule": "1f1b", "microbatches": 8},
            "train": {
                "steps": STEPS,
                "micro_batch_size": 4,
                "optimizer": {"kind": "adamw", "lr": 1.0e-3},
                # Constant, so that a step's learning rate does not depend on the run's length.
                "lr_schedule": {"kind": "constant", "warmup_steps": 5},
            },
            "checkpoint": {"url": "s3://raypp/tests", "every_steps": EVERY, "keep": 3},
            "resources": {"device": "cpu"},
        }
        for key, value in changes.items():
            section, _, inner = key.partition("__")
            if inner:
                document.setdefault(section, {})[inner] = value
            else:
                document[section] = value
        path = self.directory / f"{name}.yaml"
        path.write_text(yaml.safe_dump(document, sort_keys=False))
        return path

    def start(self, job: Path, *arguments: str) -> Run:
        document = yaml.safe_load(job.read_text())
        log = self.directory / f"{document['name']}-{time.monotonic_ns()}"
        with log.with_suffix(".out").open("wb") as out, log.with_suffix(".err").open("wb") as err:
            command = [RAYPP, "submit", str(job), *arguments]
            process = subprocess.Popen(command, env=self.environment, stdout=out, stderr=err, cwd=self.directory)
        return Run(self, document["name"], document["checkpoint"]["url"], process, log)

    # Observations ---------------------------------------------------------------------------------

    @property
    def s3(self) -> SeaweedServer:
        return SeaweedServer(**self.state["s3"])

    @property
    def dashboard(self) -> Dashboard:
        return Dashboard(self.state["dashboard"], Path(self.state["token_path"]).read_text().strip())

    def store(self, url: str = "s3://raypp/tests") -> ObjectStore:
        if url.startswith("s3://"):
            bucket, _, prefix = url.removeprefix("s3://").partition("/")
            return self.s3.store(bucket, prefix)
        return DirectoryStore(Path(url))

    def workers(self, run: str = "") -> dict[str, psutil.Process]:
        """Returns the living rank processes by title, `ray::raypp/…`."""
        found = {}
        for one in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                title = " ".join(one.cmdline()).strip()
                if title.startswith(f"ray::raypp/{run}") and self._is_ours(one):
                    found[title] = one
        return found

    def _is_ours(self, process: psutil.Process) -> bool:
        """Returns whether a rank belongs to this cluster and to no other on this machine."""
        return any(self.state["ray_dir"] in value or self.state["gcs"] in value for value in process.environ().values())

    def actors(self, state: str = "ALIVE") -> dict[str, dict[str, Any]]:
        answer = self.dashboard.get_json("/api/v0/actors?detail=1&limit=1000")
        found = answer["data"]["result"]["result"]
        return {without_digest(one["name"]): one for one in found if one["state"] == state and one["name"]}

    def groups(self, prefix: str) -> set[str]:
        answer = self.dashboard.get_json("/api/v0/placement_groups?detail=1")
        return {one["state"] for one in answer["data"]["result"]["result"] if one["name"].startswith(prefix)}

    def assert_nothing_lives(self, run: str) -> None:
        """Waits for the end of every rank, actor and placement group of a run, the only one."""
        ours = f"raypp/{run}"
        wait_for(lambda: not self.workers(), "the end of every rank")
        wait_for(lambda: not [name for name in self.actors() if name.startswith(ours)], "the end of every actor")
        assert self.groups(ours) <= {"REMOVED"}

    def jobs(self) -> list[dict[str, Any]]:
        return [one for one in self.dashboard.jobs() if (one.get("metadata") or {}).get("raypp_run")]

    @contextlib.contextmanager
    def frozen_store(self) -> Iterator[None]:
        """Freezes the S3 server. Requests wait and are carried out when the context ends."""
        os.kill(self.s3.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.s3.pid, signal.SIGCONT)

    def wait_until_store_is_missed(self, run: str, longest_s: float) -> None:
        """Waits until a rank of the run waits for the frozen server, at most so long."""
        ranks = self.workers(f"{run}/").values()
        wait_for(lambda: any(self.asks_frozen_store(rank) for rank in ranks), "", longest_s, fail=False)

    def asks_frozen_store(self, process: psutil.Process) -> bool:
        """Returns whether a process waits for the frozen server: its bytes are unread there."""
        port = int(self.s3.endpoint.rpartition(":")[2])
        mine: set[int] = set()
        with contextlib.suppress(psutil.NoSuchProcess):
            mine = {one.laddr.port for one in process.net_connections("tcp") if one.raddr and one.raddr.port == port}
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
            words = line.split()
            local, remote = (int(words[place].rpartition(":")[2], 16) for place in (1, 2))
            if local == port and remote in mine and int(words[4].rpartition(":")[2], 16) > 0:
                return True
        return False


@dataclass
class Run:
    """A submitted run, and the `raypp submit` process that follows it."""

    laptop: Laptop
    name: str
    url: str
    process: subprocess.Popen[bytes]
    log: Path
    exit_code: int | None = None
    seen_alive: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.reader = RunReader(self.laptop.store(self.url), self.name)

    @property
    def out(self) -> str:
        return self.log.with_suffix(".out").read_text()

    @property
    def err(self) -> str:
        return self.log.with_suffix(".err").read_text()

    def describe(self) -> str:
        return f"exit {self.exit_code}\n--- stdout\n{self.out[-3000:]}\n--- stderr\n{self.err[-3000:]}"

    def wait(self, timeout: float = 400) -> int:
        self.exit_code = self.process.wait(timeout)
        return self.exit_code

    def until(self, condition: Callable[[], Any], what: str, patience_s: float = _PATIENCE_S) -> Any:
        try:
            return wait_for(condition, what, patience_s)
        except AssertionError as error:
            raise AssertionError(f"{error}; status {self.status()}\n{self.describe()}") from None

    def wait_titles(self, ranks: int = 2, but: frozenset[int] | set[int] = frozenset()) -> dict[str, psutil.Process]:
        """Waits for living ranks, whose processes are not in `but`. Returns them by coordinates."""

        def there() -> dict[str, psutil.Process] | None:
            found = self.laptop.workers(f"{self.name}/")
            fresh = {title.rpartition("/")[2]: one for title, one in found.items() if one.pid not in but}
            fresh = {label: one for label, one in fresh.items() if not label.startswith("standby")}
            # Until a rank has its seat, its title ends with the actor method that Ray runs.
            return fresh if len(fresh) == ranks and not any(":" in label for label in fresh) else None

        return dict(self.until(there, f"{ranks} ranks of {self.name}"))

    def wait_seats(self, attempt: int, ranks: int = 2) -> dict[str, psutil.Process]:
        """Waits until an attempt has assigned its seats. Returns the processes by coordinates."""

        def seated() -> list[Any]:
            found = [event for event in self.events("seated") if event.attempt == attempt]
            return found if len(found) == ranks else []

        events = self.until(seated, f"the seats of attempt {attempt}")
        return {event.details["label"]: psutil.Process(event.details["pid"]) for event in events}

    def wait_step(self, step: int) -> int:
        self.until(lambda: (self.status().get("step") or 0) >= step, f"step {step}")
        return int(self.status()["step"])

    def wait_end(self) -> dict[str, Any]:
        final = ("SUCCEEDED", "FAILED", "STOPPED")
        self.until(lambda: self.status().get("state") in final, "the end")
        return self.status()

    def facts_while_alive(self) -> dict[str, Any]:
        return {
            "titles": sorted(title for title in self.laptop.workers(f"{self.name}/") if "standby" not in title),
            "actors": sorted(
                name for name in self.laptop.actors() if name.startswith(f"raypp/{self.name}") and "standby" not in name
            ),
            "jobs": [one for one in self.laptop.jobs() if one["metadata"]["raypp_run"] == self.name],
        }

    # Records --------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        return self.reader.status() or {}

    def history(self) -> list[dict[str, Any]]:
        return self.reader.history()

    def events(self, kind: str) -> list[Any]:
        return [event for event in self.reader.events() if event.kind == kind]

    def commits(self) -> list[int]:
        return [checkpoint.step for checkpoint in list_checkpoints(self.laptop.store(self.url), self.name)]

    def weights(self, step: int | None = None) -> dict[str, Any]:
        return weights(self.laptop.store(self.url), self.name, step)

    def assert_like(self, other: Run) -> None:
        assert numbers(self.history()) == numbers(other.history())
        assert_same_weights(self.weights(), other.weights())


def weights(store: ObjectStore, run: str, step: int | None = None) -> dict[str, np.ndarray[Any, Any]]:
    """Reads every tensor of a commit (by default the newest). The ranks hold disjoint names."""
    step = step if step is not None else list_checkpoints(store, run)[-1].step
    tensors: dict[str, np.ndarray[Any, Any]] = {}
    for record in read_commit(store, run, step).objects:
        part = load_tensors(store.get(record.key))
        assert not tensors.keys() & part.keys()
        tensors |= part
    return tensors


def numbers(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Returns the part of a history that depends only on the job: no times and no attempts."""
    return [(row["step"], row["loss"], row["grad_norm"], row["tokens"], row["seq_len"]) for row in rows]


def assert_same_weights(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    different = [name for name in one if one[name].tobytes() != other[name].tobytes()]
    assert not different


def bare_environment() -> dict[str, str]:
    """Returns this process's environment without what names another cluster or store."""
    unwanted = ("AWS_", "RAY_", "RAYPP_", "OMP_")
    return {key: value for key, value in os.environ.items() if not key.startswith(unwanted)}


def copy_run(source: ObjectStore, run: str, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    store = DirectoryStore(target)
    for info in source.list(f"{run}/"):
        store.put(info.key, source.get(info.key))


def wait_for(condition: Callable[[], Any], what: str, patience_s: float = _PATIENCE_S, *, fail: bool = True) -> Any:
    """Checks 50 times a second whether the condition is true; a busy cluster is asked again."""
    end = time.monotonic() + patience_s
    while True:
        unanswered = ""
        try:
            if answer := condition():
                return answer
        except (UnreachableError, DashboardError) as error:
            unanswered = f": {error}"
        if time.monotonic() > end:
            if not fail:
                return None
            raise AssertionError(f"{what} did not come about within {patience_s:.0f} s{unanswered}")
        time.sleep(0.02)
