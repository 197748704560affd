"""What a run's controller costs per rank, and how many ranks one can hold: `python -m benchmarks.controller_scale`.

The real controller actor (`raypp.control.controller`, with its leader, record, watch and gauges) in a Ray of the
benchmark's own leads a run whose ranks are simulated: a few processes send the batches of all ranks, each rank through
its own `Outbox`, once a period, with a finished step of rank 0 every second. "without Ray" hands the same batches to
the leader inside its own process, so that the difference is what Ray's actor calls cost. Nothing is trained.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray

from benchmarks.surroundings import describe
from raypp.control import machine as m
from raypp.control.controller import Controller
from raypp.control.crew import Crew
from raypp.control.leader import Leader, start_thread
from raypp.control.messages import Batch, Presence, RunRequest, Standing
from raypp.control.outbox import Outbox
from raypp.control.placement import Placement
from raypp.mesh.geometry import Mesh
from raypp.records import Coordinates, NodeFacts, Seat, StepReport
from raypp.spec.job import Job

DEVICES_PER_NODE = 8
STARTS = 5
THREADS = 128  # as the driver starts the controller
PARTS = ("data", "negotiate", "pipeline", "reduce", "optimizer", "save")


def job_document(ranks: int, url: str) -> dict[str, Any]:
    """A job of so many ranks; nothing but its mesh, its name and its store matter here."""
    return {
        "name": f"held-{ranks}",
        "model": {
            "kind": "llama", "num_layers": 8, "hidden_size": 64, "num_heads": 4, "num_kv_heads": 4, "ffn_size": 128,
            "vocab_size": 256,
        },
        "data": {"kind": "synthetic", "seq_len": 64},
        "mesh": {"pp": 4, "fsdp": 5, "dp_replicate": ranks // 20},
        "pipeline": {"microbatches": 8},
        "train": {"steps": 1_000_000, "micro_batch_size": 1},
        "checkpoint": {"url": url},
        "recovery": {"standby": False},
    }  # fmt: skip


class HeldLeader(Leader):
    """Leads ranks that are not there: it adopts them as a later life of a controller does, and then is as ever."""

    def __init__(self, request: RunRequest, handle: Any, stand_in: Any) -> None:
        super().__init__(request, handle, again=False)
        self._stand_in = stand_in

    def _begin(self) -> None:
        job = self._job
        mesh = Mesh.of(job.mesh)
        self._device = "cpu"
        self._placement = Placement(f"{self._request.run}-no-group", mesh.world, {"CPU": 1.0})
        self._crew = Crew(self._request, job, self._handle, self._device)
        self.record.begin(None, None)
        attempt = self._new_attempt(1)
        attempt.adopt([(self._stand_in, _standing(self._request.run, mesh, rank)) for rank in range(mesh.world)])
        self._attempt = attempt
        self._start_watch(attempt)
        self._apply(m.Start(1, None, adopted=True))


def _standing(run: str, mesh: Mesh, rank: int) -> Standing:
    """What a worker in that seat would say of itself."""
    node = rank // DEVICES_PER_NODE
    address = f"10.{node >> 16}.{node >> 8 & 255}.{node & 255}"
    facts = NodeFacts(f"{node:056x}", address, f"node-{node}", 10_000 + rank, "eth0", rank % DEVICES_PER_NODE)
    seat = Seat(run, 1, rank, mesh.world, mesh.coordinates(rank), mesh.sizes, node_rank=node, node=address)
    return Standing(Presence(facts, 29500), rank, seat, ended=False)


class StandIn:
    """The other end of every rank's pending answer, which never comes."""

    async def outcome(self, attempt: int) -> None:
        await asyncio.Event().wait()


@dataclass(frozen=True)
class Usage:
    """Of the controller's process so far: CPU seconds, of them the leader's own thread's, and resident bytes."""

    cpu_s: float
    leader_s: float
    resident: int


class HeldController(Controller):
    """The real controller actor around a `HeldLeader`."""

    def __init__(self, request: RunRequest, stand_in: Any) -> None:
        self._request = request
        self._read = threading.Event()
        self._watched_at = 0.0
        self._handle = ray.get_runtime_context().current_actor
        self._leader = HeldLeader(request, self._handle, stand_in)
        self._thread = start_thread(self._leader, lambda: None)

    def ready(self) -> str:
        """The run's state."""
        return str(self._leader.record.status().state)

    def usage(self) -> Usage:
        own = next(t for t in psutil.Process().threads() if t.id == self._thread.native_id)
        return Usage(time.process_time(), own.user_time + own.system_time, psutil.Process().memory_info().rss)

    def waiting(self) -> int:
        """Batches nobody has looked at yet."""
        return self._leader._inbox.qsize()

    def feed(self, ranks: int, period_s: float, seconds: float) -> float:
        """Hands over the batches of all ranks from inside this process; returns the CPU seconds of the ranks' part."""
        simulated = [Simulated(rank) for rank in range(ranks)]
        made, end, begun = 0.0, time.monotonic() + seconds, time.monotonic()
        done = 0
        while (now := time.monotonic()) < end:
            due = int((now - begun) / period_s * ranks)
            started = time.thread_time()
            batches = [simulated[number % ranks].batch() for number in range(done, due)]
            made += time.thread_time() - started
            done = due
            answers = [self._leader.take(batch) for batch in batches]
            started = time.thread_time()
            for batch, answer in zip(batches, answers, strict=True):
                simulated[batch.rank].outbox.delivered(batch, answer)
            made += time.thread_time() - started
            time.sleep(0.02)
        return made

    def sizes(self) -> dict[str, int]:
        """Bytes of the run's documents in its store, by the first folder of their names."""
        self._leader.record._recorder.flush()
        found: dict[str, int] = {}
        run = self._leader._job.run_url.removeprefix("file://")
        for path in Path(run).rglob("*"):
            if path.is_file():
                kind = path.relative_to(run).parts[0]
                found[kind] = found.get(kind, 0) + path.stat().st_size
        return found

    def end(self) -> None:
        self._leader.record.close()


class Simulated:
    """One rank's way of telling: always on the move, and with a step each second when it is rank 0."""

    def __init__(self, rank: int) -> None:
        coordinates = Coordinates()
        self.rank, self.outbox = rank, Outbox(Seat("held", 1, rank, 1, coordinates, coordinates))
        self._stepped, self._step, self._told = time.monotonic(), 0, 0

    def batch(self) -> Batch:
        self._told += 1
        if self.rank == 0 and time.monotonic() - self._stepped >= 1.0:
            self._stepped, self._step = time.monotonic(), self._step + 1
            parts = dict.fromkeys(PARTS, 0.123456789)
            self.outbox.add_step(StepReport(self._step, 3.25, 1.5, 65536, 4096, 1.0, 65536.0, 1, 3e-4, parts))
        return self.outbox.take(f"step {self._told} 1F{self._told % 8}", 0.01)


@ray.remote(num_cpus=0)
class Sender:
    """A process that sends for many ranks."""

    def __init__(self, controller: Any, first: int, count: int, ranks: int) -> None:
        self._controller, self._all = controller, ranks
        self._simulated = [Simulated(first + number) for number in range(count)]

    async def send(self, period_s: float, seconds: float) -> tuple[int, float]:
        """Reports for so long; returns how many reports were answered, and the longest time one waited."""
        end = time.monotonic() + seconds
        told = await asyncio.gather(*(self._tell(one, period_s, end) for one in self._simulated))
        return sum(count for count, _ in told), max(longest for _, longest in told)

    async def _tell(self, one: Simulated, period_s: float, end: float) -> tuple[int, float]:
        count, longest = 0, 0.0
        due = time.monotonic() + period_s * one.rank / self._all  # spread, as ranks of different nodes are
        while due < end:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            batch, asked = one.batch(), time.monotonic()
            one.outbox.delivered(batch, await self._controller.report.remote(batch))
            longest = max(longest, time.monotonic() - asked)
            due = max(due + period_s, time.monotonic())
            count += 1
        return count, longest


@dataclass(frozen=True)
class Row:
    """What one size of run cost, per second: CPU seconds of the controller in all and of its leading thread."""

    ranks: int
    way: str
    reports: float
    cpu: float
    leader: float
    resident: int
    longest_s: float
    waiting: int


def measure(ranks: int, period_s: float, seconds: float, senders: int) -> tuple[list[Row], dict[str, int]]:
    """One size of run, through Ray and without."""
    with tempfile.TemporaryDirectory() as folder:
        document = Job.model_validate(job_document(ranks, folder)).model_dump(mode="json")
        request = RunRequest(f"held-{ranks}", document)
        stand_in = ray.remote(num_cpus=0)(StandIn).options(max_concurrency=ranks + 10).remote()
        controller: Any = ray.remote(HeldController).options(num_cpus=0, max_concurrency=THREADS)
        controller = controller.remote(request, stand_in)
        while ray.get(controller.ready.remote()) != "RUNNING":
            time.sleep(0.2)
        rows = [_idle(controller, ranks, seconds)]
        before = ray.get(controller.usage.remote())
        made = ray.get(controller.feed.remote(ranks, period_s, seconds))
        after = ray.get(controller.usage.remote())
        left = ray.get(controller.waiting.remote())
        rows.append(_row(ranks, "without Ray", ranks / period_s, before, after, seconds, made, 0.0, left))
        share = -(-ranks // senders)
        crowd = [Sender.remote(controller, first, min(share, ranks - first), ranks) for first in range(0, ranks, share)]
        ray.get([one.send.remote(period_s, 2.0) for one in crowd])
        before, begun = ray.get(controller.usage.remote()), time.monotonic()
        told = ray.get([one.send.remote(period_s, seconds) for one in crowd])
        took = time.monotonic() - begun
        after = ray.get(controller.usage.remote())
        left = ray.get(controller.waiting.remote())
        rate = sum(count for count, _ in told) / took
        rows.append(_row(ranks, "Ray calls", rate, before, after, took, 0.0, max(late for _, late in told), left))
        sizes = ray.get(controller.sizes.remote())
        ray.get(controller.end.remote())
        for actor in (*crowd, controller, stand_in):
            ray.kill(actor)
    return rows, sizes


def _idle(controller: Any, ranks: int, seconds: float) -> Row:
    before = ray.get(controller.usage.remote())
    time.sleep(seconds / 2)
    return _row(ranks, "nobody reports", 0, before, ray.get(controller.usage.remote()), seconds / 2, 0.0, 0.0, 0)


def _row(
    ranks: int, way: str, rate: float, before: Usage, after: Usage, took: float, made: float, late: float, left: int
) -> Row:
    cpu, leader = after.cpu_s - before.cpu_s - made, after.leader_s - before.leader_s
    return Row(ranks, way, rate, cpu / took, leader / took, after.resident, late, left)


def _start_ray() -> None:
    """A Ray of this benchmark's own; a loaded machine may need more than the 30 s that Ray gives itself."""
    place = str(Path(__file__).resolve().parent.parent)
    for left in reversed(range(STARTS)):
        try:
            ray.init(
                address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="error",
                runtime_env={"env_vars": {"PYTHONPATH": place}},
            )  # fmt: skip
            return
        except Exception:
            ray.shutdown()
            if not left:
                raise


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--ranks", type=int, nargs="+", default=[100, 1000, 10000], help="multiples of 20")
    arguments.add_argument("--period", type=float, default=1.0, help="seconds between two reports of a rank")
    arguments.add_argument("--seconds", type=float, default=20.0, help="how long each way is watched")
    arguments.add_argument("--senders", type=int, default=2, help="processes that send for the ranks")
    given = arguments.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 65536)), hard))
    _start_ray()
    print(describe())
    print(f"every rank reports each {given.period:g} s; {given.senders} processes send for all of them\n")
    print("| ranks | way | reports/s | share of a core | of it the leading thread | CPU µs per rank and second |"
          " resident, MB | slowest answer, s | batches left over |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|")
    documents = []
    try:
        for ranks in given.ranks:
            rows, sizes = measure(ranks, given.period, given.seconds, given.senders)
            documents.append((ranks, sizes))
            for row in rows:
                print(
                    f"| {row.ranks:,} | {row.way} | {row.reports:,.0f} | {row.cpu:.2%} | {row.leader:.2%} |"
                    f" {row.cpu / row.ranks * 1e6:,.0f} | {row.resident / 1e6:,.0f} | {row.longest_s:.2f} |"
                    f" {row.waiting:,} |",
                    flush=True,
                )
    finally:
        ray.shutdown()
    for ranks, sizes in documents:
        print(f"\n{ranks:,} ranks, bytes in the store: " + ", ".join(f"{k} {v:,}" for k, v in sorted(sizes.items())))


if __name__ == "__main__":
    sys.exit(main())
