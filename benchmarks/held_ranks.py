"""A real controller with simulated ranks and idle processes, for `controller_scale`."""

import asyncio
import random
import threading
import time
from dataclasses import dataclass
from typing import Any

import psutil
import ray

from raypp.control import machine as m
from raypp.control.controller import Controller
from raypp.control.leader import Leader
from raypp.control.placement import Placement
from raypp.control.protocol import BatchAnswer, ReportBatch, RunRequest, WorkerInfo, WorkerStatus
from raypp.control.report.reporter import ReportBuffer
from raypp.control.worker import ask_interval_s
from raypp.control.worker_group import WorkerGroup
from raypp.planning.decide import decide
from raypp.planning.geometry import Mesh
from raypp.records import Coordinates, NodeFacts, Seat, StepReport

DEVICES_PER_NODE = 8
PARTS = ("data", "negotiate", "pipeline", "reduce", "optimizer", "save")


def job_document(ranks: int, url: str) -> dict[str, Any]:
    """Returns a job with this many ranks. Only its mesh, its name and its store matter here."""
    return {
        "name": f"held-{ranks}",
        "model": {"num_layers": 8, "hidden_size": 64, "num_heads": 4, "ffn_size": 128, "vocab_size": 256},
        "data": {"kind": "synthetic", "seq_len": 64},
        "mesh": {"pp": 4, "fsdp": 5, "dp_replicate": ranks // 20},
        "pipeline": {"microbatches": 8},
        "train": {"steps": 10_000_000, "micro_batch_size": 1},
        "checkpoint": {"url": url},
        "recovery": {"standby": False},
    }  # fmt: skip


class HeldLeader(Leader):
    """Leads simulated ranks: it adopts them like a restarted controller, then works as usual."""

    def __init__(self, request: RunRequest, handle: Any, stand_in: Any) -> None:
        super().__init__(request, handle, restarted=False)
        self._stand_in = stand_in

    def _begin(self) -> None:
        job = self._job
        mesh = Mesh.of(job.mesh)
        self._device = "cpu"
        self._placement = Placement(f"{self._request.run}-no-group", mesh.world, {"CPU": 1.0})
        self._workers = WorkerGroup(self._request, job, self._handle, self._device)
        self._has_resources = True
        self.record.begin(None)
        attempt = self._new_attempt(1)
        attempt.adopt([(self._stand_in, _standing(self._request.run, mesh, rank)) for rank in range(mesh.world)])
        self._attempt, attempt.decision = attempt, decide(job)
        self._start_watch(attempt)
        self._apply(m.TakenOver(1, alive=True))


def _standing(run: str, mesh: Mesh, rank: int) -> WorkerStatus:
    """Returns what a worker in that seat would report about itself."""
    node = rank // DEVICES_PER_NODE
    address = f"10.{node >> 16}.{node >> 8 & 255}.{node & 255}"
    facts = NodeFacts(f"{node:056x}", address, f"node-{node}", 10_000 + rank, "eth0", rank % DEVICES_PER_NODE)
    seat = Seat(run, 1, rank, mesh.world, mesh.coordinates(rank), mesh.sizes, node_rank=node, node=address)
    return WorkerStatus(WorkerInfo(facts, 29500), rank, seat)


class StandIn:
    """Answers for all ranks that they are still running, after a wait like that of real workers."""

    def __init__(self, ranks: int) -> None:
        self._first = ranks

    async def outcome(self, attempt: int, patience_s: float) -> None:
        self._first -= 1
        # The first calls arrive all at once. Later in a run, they are spread out.
        await asyncio.sleep(patience_s * random.random() if self._first >= 0 else patience_s)


@dataclass(frozen=True)
class Usage:
    """What the controller's process has used so far: CPU seconds of all threads, and of the leading
    one; resident bytes; calls of ranks and idle processes; and the age of the oldest heartbeat."""

    cpu_s: float
    leader_s: float
    resident: int
    calls: int
    oldest_s: float


class HeldController(Controller):
    """The real controller actor around a `HeldLeader`."""

    def __init__(self, request: RunRequest, stand_in: Any) -> None:
        self._request = request
        self._read = threading.Event()
        self._watched_at = 0.0
        self._calls = 0
        self._handle = ray.get_runtime_context().current_actor
        self._leader = HeldLeader(request, self._handle, stand_in)
        self._thread = threading.Thread(target=self._leader.run, daemon=True)
        self._thread.start()

    def ready(self) -> str:
        """Returns the state of the run."""
        return str(self._leader.record.status().state)

    def report(self, batch: ReportBatch) -> BatchAnswer:
        self._calls += 1
        return super().report(batch)

    def alive(self) -> None:
        self._calls += 1

    def usage(self) -> Usage:
        own = next(t for t in psutil.Process().threads() if t.id == self._thread.native_id)
        watch, now = self._leader.reports.watch, time.monotonic()
        oldest = now - min(watch._heartbeat_at) if watch is not None else 0.0
        resident = psutil.Process().memory_info().rss
        return Usage(time.process_time(), own.user_time + own.system_time, resident, self._calls, oldest)

    def feed(self, ranks: int, period_s: float, seconds: float) -> float:
        """Feeds the batches of all ranks from this process; returns the ranks' CPU seconds."""
        simulated = [Simulated(rank, 0) for rank in range(ranks)]
        made, end, begun = 0.0, time.monotonic() + seconds, time.monotonic()
        done = 0
        while (now := time.monotonic()) < end:
            due = int((now - begun) / period_s * ranks)
            started = time.thread_time()
            batches = [simulated[number % ranks].batch() for number in range(done, due)]
            made += time.thread_time() - started
            done = due
            answers = [self._leader.reports.report(batch) for batch in batches]
            started = time.thread_time()
            for batch, answer in zip(batches, answers, strict=True):
                simulated[batch.rank].buffer.sent(batch, answer)
            made += time.thread_time() - started
            time.sleep(0.02)
        return made


class Simulated:
    """The reports of one rank: it always makes progress, and rank 0 reports a step each second.
    `first`: number of its batches and steps. The controller does not write a known report again."""

    def __init__(self, rank: int, first: int) -> None:
        coordinates = Coordinates()
        self.rank, self.buffer = rank, ReportBuffer(Seat("held", 1, rank, 1, coordinates, coordinates))
        self._stepped, self._step, self._told = time.monotonic(), first, 0
        self.buffer._number = first

    def batch(self) -> ReportBatch:
        self._told += 1
        if self.rank == 0 and time.monotonic() - self._stepped >= 1.0:
            self._stepped, self._step = time.monotonic(), self._step + 1
            parts = dict.fromkeys(PARTS, 0.123456789)
            self.buffer.add_step(StepReport(self._step, 3.25, 1.5, 65536, 4096, 1.0, 65536.0, 1, 3e-4, parts))
        return self.buffer.next_batch(f"step {self._told} 1F{self._told % 8}", 0.01)


@ray.remote(num_cpus=0)
class Sender:
    """A process that sends the reports of many ranks to `target`, the controller."""

    def __init__(self, target: Any, first: int, count: int, ranks: int) -> None:
        self._target, self._all = target, ranks
        self._simulated = [Simulated(first + number, 2_000_000) for number in range(count)]

    async def send(self, period_s: float, seconds: float) -> tuple[int, float]:
        """Reports for this many seconds; returns the number of answers and the longest wait."""
        told, longest, begun = 0, 0.0, time.monotonic()

        async def tell(one: Simulated) -> None:
            nonlocal told, longest
            due = begun + period_s * one.rank / self._all  # spread, as ranks of different nodes are
            while True:
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                batch, asked = one.batch(), time.monotonic()
                one.buffer.sent(batch, await self._target.report.remote(batch))
                told, longest = told + 1, max(longest, time.monotonic() - asked)
                due = max(due + period_s, time.monotonic())

        tasks = [asyncio.create_task(tell(one)) for one in self._simulated]
        done, waiting = await asyncio.wait(tasks, timeout=seconds)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for task in done:  # only an error can have ended it
            task.result()
        return told, longest


@ray.remote(num_cpus=0)
class Idlers:
    """The idle processes of a run, one per node. Each checks the controller periodically."""

    async def ready(self) -> None:
        """Returns once the process has started."""

    async def ask(self, controller: Any, ranks: int, seconds: float) -> None:
        between = ask_interval_s(ranks) / -(-ranks // DEVICES_PER_NODE)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            await controller.alive.remote()
            await asyncio.sleep(between)
