"""Runs ranks (`run_rank`) in real processes that real signals kill, attempt after attempt."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from harness import _context
from safetensors.torch import load_file

from raypp.job.load import parse_job
from raypp.planning.decide import decide
from raypp.planning.geometry import Mesh
from raypp.ports import free_port
from raypp.rank.joining.lost_peer import LostPeerError
from raypp.rank.rank import run_rank
from raypp.records import Event, RankResult, Requests, Seat, StepReport
from raypp.state.checkpoint.commit import claim_attempt, read_commit
from raypp.state.checkpoint.layout import commit_key
from raypp.state.memory.files import DIRECTORY_VARIABLE, list_slots
from raypp.state.memory.tier import MemoryTier
from raypp.storage.directory import DirectoryStore

PATIENCE_S = 120.0


@dataclass
class Kill:
    """Which ranks die, and when: in the step after `after`, as soon as every rank has a complete
    snapshot of that step, or of a later one if it trains apart.

    Attributes:
        ranks: Ranks that are killed by SIGKILL.
        after: The last step that finishes.
        memory: False if the kill does not wait for the snapshot.
        copies: Number of ranks that must have a copy of the same step on another node, of which
            every rank has its own snapshot, too: an older one could not be restored.
        commit: A step that must be committed first.
    """

    ranks: tuple[int, ...]
    after: int
    memory: bool = True
    copies: int = 0
    commit: int | None = None


@dataclass
class AttemptReports:
    """What ranks reported, by the process that was rank 0 or by any process."""

    losses: dict[int, float] = field(default_factory=dict)
    steps: list[int] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    results: dict[int, RankResult] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)

    def of_kind(self, kind: str) -> list[Event]:
        return [event for event in self.events if event.kind == kind]

    def restored(self) -> str:
        return self.of_kind("restored")[-1].message


class _Speaker:
    """A rank's reporter. Sends everything to the test's process, and kills the rank."""

    def __init__(self, connection: Any, seat: Seat, kill: Kill | None, directories: list[str], url: str) -> None:
        self._connection, self._seat, self._kill, self._directories = connection, seat, kill, directories
        self._store = DirectoryStore(Path(url))
        self._step = 0

    def phase(self, name: str, detail: str = "", reached: object = None) -> None:
        first, _, rest = detail.partition(" ")
        if name == "step" and rest == "read":
            self._step = int(first)
        kill = self._kill
        # "read" is reported before the ranks agree on the step, schedule actions after it.
        in_step = (
            name == "step"
            and rest != "read"
            and detail.split()[-1:] != ["agree"]
            and kill is not None
            and self._step == kill.after + 1
        )
        if in_step and kill is not None and self._seat.rank in kill.ranks:
            if kill.memory or kill.commit is not None:
                self._wait_for_what_is_kept(kill)
            os.kill(os.getpid(), signal.SIGKILL)

    def _wait_for_what_is_kept(self, kill: Kill) -> None:
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            names = [name for folder in set(self._directories) for name, _ in list_slots(Path(folder))]
            here = [name for name in names if name.attempt == self._seat.attempt and name.kind == "own"]
            whole = {name.rank for name in here if (name.step or 0) >= kill.after}
            own = {(name.rank, name.step) for name in names if name.kind == "own"}
            copied = {(name.rank, name.step) for name in names if name.kind == "copy"}
            held = {step for _, step in own if len({rank for rank, of in own if of == step}) == self._seat.world_size}
            copies = max((len({rank for rank, of in copied if of == step}) for step in held - {None}), default=0)
            committed = kill.commit is None or self._store.head(commit_key(self._seat.run, kill.commit)) is not None
            if (not kill.memory or len(whole) == self._seat.world_size) and copies >= kill.copies and committed:
                return
            time.sleep(0.002)
        raise TimeoutError(f"no snapshots or commit of step {kill.after}: {names}")

    def step(self, report: StepReport) -> None:
        self._connection.send(("step", report))

    def event(self, event: Event) -> None:
        self._connection.send(("event", event))

    def requests(self) -> Requests:
        return Requests()


def _live(
    connection: Any,
    document: dict[str, Any],
    first: Seat,
    kill: Kill | None,
    directories: list[str],
    environment: dict[str, str],
    stay: bool,
    prepare: Callable[[int, int, int], None] | None,
) -> None:
    """Runs a rank's process. With `stay`, it waits for its next seat after a peer is lost."""
    os.environ.update(environment)
    if kill is not None and kill.memory:
        snapshots_keep_up()
    if kill is not None and kill.copies:
        _copies_keep_up()
    if prepare is not None:
        prepare(first.rank, first.world_size, first.master_port)
    os.environ.update({"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", DIRECTORY_VARIABLE: directories[first.rank]})
    job, seat = parse_job(document), first
    while True:
        try:
            result = run_rank(decide(job), seat, _Speaker(connection, seat, kill, directories, job.checkpoint.url))
            connection.send(("left", _left_over()))
            connection.send(("result", result))
            return
        except LostPeerError as error:
            connection.send(("left", _left_over()))
            connection.send(("error", str(error)))
            if not stay:
                return
            seat, kill = connection.recv()
        except BaseException as error:  # noqa: BLE001 - belongs in the test's report
            connection.send(("left", _left_over()))
            connection.send(("error", f"{type(error).__name__}: {error}"))
            return


def snapshots_keep_up(*_: int) -> None:
    """Makes each step wait until the snapshot before is complete. On a busy machine a step could
    else have none, and a test wait for it in vain."""
    signals = MemoryTier.signals

    def wait_and_signal(self: MemoryTier) -> Any:
        while self._asked and not self.trouble and not (self._ready and self._own_step == self._expected):
            time.sleep(0.002)
        return signals(self)

    MemoryTier.signals = wait_and_signal  # type: ignore[method-assign]


def _copies_keep_up() -> None:
    """Makes each step wait until the copy of the snapshot before has arrived. On a busy machine the
    newest copy could else be older than a commit, and of no use."""
    signals = MemoryTier.signals

    def wait_and_signal(self: MemoryTier) -> Any:
        sender = self._sender
        with contextlib.nullcontext() if sender is None else sender._wake:
            assert sender is None or sender._wake.wait_for(lambda: sender._slot is None, PATIENCE_S)
        return signals(self)

    MemoryTier.signals = wait_and_signal  # type: ignore[method-assign]


def _left_over() -> list[str]:
    """Returns the threads that outlive a rank's life, and the locks of the memory tier it holds."""
    locks = [line.split() for line in Path("/proc/locks").read_text().splitlines() if "FLOCK" in line]
    own = {inode.rpartition(":")[2] for _, _, _, _, pid, inode, *_ in locks if pid == str(os.getpid())}
    slots = list_slots(Path(os.environ[DIRECTORY_VARIABLE]))
    held = [str(path) for _, path in slots if str(path.stat().st_ino) in own]
    names = (thread.name for thread in threading.enumerate())
    return held + [name for name in names if name in ("raypp-seal", "raypp-copy", "raypp-copies", "raypp-outer")]


class LocalRun:
    """One run on simulated nodes, attempt after attempt."""

    def __init__(
        self,
        document: dict[str, Any],
        root: Path,
        directories: list[Path],
        nodes: list[int],
        environment: dict[str, str] | None = None,
        device: str = "cpu",
        prepare: Callable[[int, int, int], None] | None = None,
    ) -> None:
        self.environment, self._prepare = environment or {}, prepare
        self._device, _, index = device.partition(":")
        self._device_index = int(index or 0)
        self.document = {**document, "checkpoint": {"url": str(root), "every_steps": 0, **document["checkpoint"]}}
        self.store, self.nodes = DirectoryStore(root), nodes
        self.directories = [str(folder) for folder in directories]
        self.attempt = self.port = 0
        self._processes: dict[int, tuple[Any, Any]] = {}

    def attempt_once(self, kill: Kill | None = None, *, stay: bool = False) -> AttemptReports:
        """Runs an attempt to its end: success, or the death that `kill` describes. With `stay`, the
        survivors take part in the next attempt."""
        self.attempt += 1
        claim_attempt(self.store, self.document["name"], self.attempt)
        mesh, port = Mesh.of(parse_job(self.document).mesh), free_port()
        self.port = port
        reports = AttemptReports()
        pipes: dict[int, Any] = {}
        for rank in range(mesh.world):
            seat = self._seat(mesh, rank, port)
            if rank in self._processes:
                process, here = self._processes[rank]
                here.send((seat, kill))
            else:
                here, there = _context.Pipe(duplex=True)
                process = _context.Process(
                    target=_live,
                    args=(there, self.document, seat, kill, self.directories, self.environment, stay, self._prepare),
                    daemon=True,
                )
                process.start()
                there.close()
                self._processes[rank] = (process, here)
            pipes[rank] = here
        try:
            self._listen(pipes, reports, stay)
        except BaseException:
            for rank, (process, _) in list(self._processes.items()):
                process.kill()
                self._bury(rank)
            raise
        return reports

    def _listen(self, pipes: dict[int, Any], reports: AttemptReports, stay: bool) -> None:
        open_ones, end = dict(pipes), time.monotonic() + PATIENCE_S
        while open_ones:
            assert time.monotonic() < end, f"ranks {sorted(open_ones)} do not come to an end: {reports}"
            for rank, pipe in list(open_ones.items()):
                try:
                    if not pipe.poll(0.005):
                        continue
                    kind, value = pipe.recv()
                except (EOFError, ConnectionResetError):
                    self._bury(rank)
                    del open_ones[rank]
                    continue
                _note(reports, rank, kind, value)
                if kind == "error" and stay:
                    del open_ones[rank]

    def _bury(self, rank: int) -> None:
        process, pipe = self._processes.pop(rank)
        process.join(timeout=10)
        pipe.close()

    def _seat(self, mesh: Mesh, rank: int, port: int) -> Seat:
        node = self.nodes[rank]
        here = [other for other, where in enumerate(self.nodes) if where == node]
        return Seat(
            self.document["name"], self.attempt, rank, mesh.world, mesh.coordinates(rank), mesh.sizes,
            local_rank=here.index(rank), local_world_size=len(here), node_rank=node, node="127.0.0.1",
            master_port=port, device=self._device, device_index=self._device_index,
        )  # fmt: skip

    def final_state(self, step: int | None = None) -> dict[str, torch.Tensor]:
        name, steps = self.document["name"], self.document["train"]["steps"]
        commit = read_commit(self.store, name, steps if step is None else step)
        root = Path(self.document["checkpoint"]["url"])
        return {key: value for one in commit.objects for key, value in load_file(root / one.key).items()}


def _note(reports: AttemptReports, rank: int, kind: str, value: Any) -> None:
    if kind == "step":
        reports.losses[value.step] = value.loss
        reports.steps.append(value.step)
    elif kind == "event":
        reports.events.append(value)
    elif kind == "left":
        reports.left += value
    elif kind == "result":
        reports.results[rank] = value
    else:
        reports.errors[rank] = value


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
