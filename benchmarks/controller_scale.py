"""What a controller costs per rank, and how many ranks it supports.

It starts its own Ray with the real controller actor (`raypp.control.controller`, with its leader,
record, watch and metrics) and simulates the ranks of the run: each rank reports through its own
`ReportBuffer` as often as in a run of that size, and rank 0 reports a finished step every second.
Nothing is trained. There are three cases:

- "nobody reports": no reports.
- "without Ray": the leader receives the same batches inside its own process. The difference to the
  other cases is the cost of Ray's calls.
- "each rank": a few processes call the controller for every report.

The controller's other calls are made, too. The call that waits for a rank's end stays pending as
long as with real workers. One idle process per node checks the controller, as standby workers do.
"""

import logging
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import ray

from benchmarks.held_ranks import HeldController, Idlers, Sender, StandIn, Usage, job_document
from benchmarks.surroundings import begin
from benchmarks.tables import head
from raypp.control.protocol import RunRequest
from raypp.control.report.reporter import interval_s
from raypp.job.job import Job

STARTS = 5
THREADS = 128  # as the driver starts the controller
SENDERS = 2
"""Processes that send for the ranks."""
TITLES = (
    "ranks | way | reports/s | calls/s | share of a core | of it the leading thread | CPU µs per rank and second"
    " | resident, MB | slowest answer, s | oldest sign of life, s"
)


def measure(ranks: int, period_s: float, seconds: float) -> None:
    """Measures one size of run in every case, and prints a row of each."""
    with tempfile.TemporaryDirectory() as folder:
        document = Job.model_validate(job_document(ranks, folder)).model_dump(mode="json")
        request = RunRequest(f"held-{ranks}", document)
        stand_in = ray.remote(StandIn).options(num_cpus=0, max_concurrency=ranks + 10).remote(ranks)
        controller: Any = ray.remote(HeldController).options(num_cpus=0, max_concurrency=THREADS)
        controller = controller.remote(request, stand_in)
        while ray.get(controller.ready.remote()) != "RUNNING":
            time.sleep(0.2)
        before = ray.get(controller.usage.remote())
        time.sleep(seconds / 2)
        _print_row(ranks, "nobody reports", before, ray.get(controller.usage.remote()), seconds / 2)
        before = ray.get(controller.usage.remote())
        made = ray.get(controller.feed.remote(ranks, period_s, seconds))
        after = ray.get(controller.usage.remote())
        _print_row(ranks, "without Ray", before, after, seconds, int(ranks / period_s * seconds), made=made)
        share = -(-ranks // SENDERS)
        firsts = range(0, ranks, share)
        crowd: list[Any] = [Sender.remote(controller, at, min(share, ranks - at), ranks) for at in firsts]  # type: ignore[attr-defined]
        _report_through_ray(ranks, controller, crowd, period_s, seconds)
        for actor in (*crowd, controller, stand_in):
            ray.kill(actor)


def _report_through_ray(ranks: int, controller: Any, crowd: list[Any], period_s: float, seconds: float) -> None:
    """Measures the cost of reports that reach the controller through Ray."""
    ray.get([one.send.remote(period_s, 2.0) for one in crowd])
    idlers: Any = Idlers.remote()  # type: ignore[attr-defined]
    ray.get(idlers.ready.remote())
    asking = idlers.ask.remote(controller, ranks, seconds)
    before, begun = ray.get(controller.usage.remote()), time.monotonic()
    told = ray.get([one.send.remote(period_s, seconds) for one in crowd])
    after, took = ray.get(controller.usage.remote()), time.monotonic() - begun
    ray.get(asking)
    ray.kill(idlers)
    count, late = sum(count for count, _ in told), max(late for _, late in told)
    _print_row(ranks, "each rank", before, after, took, count, late)


def _print_row(
    ranks: int, way: str, before: Usage, after: Usage, took: float, reports: int = 0, late: float = 0, made: float = 0
) -> None:
    """`took`: seconds between both usages; `made`: CPU seconds that are not the controller's."""
    cpu, leader = (after.cpu_s - before.cpu_s - made) / took, (after.leader_s - before.leader_s) / took
    calls, oldest = (after.calls - before.calls) / took, after.oldest_s if reports else 0.0
    print(
        f"| {ranks:,} | {way} | {reports / took:,.0f} | {calls:,.1f} | {cpu:.2%} | {leader:.2%} "
        f"| {cpu / ranks * 1e6:,.0f} | {after.resident / 1e6:,.0f} | {late:.2f} | {oldest:.2f} |",
        flush=True,
    )


def _start_ray() -> None:
    """Starts a separate Ray. Retries: a loaded machine may exceed Ray's own timeout of 30 s."""
    place = str(Path(__file__).resolve().parent.parent)
    for left in reversed(range(STARTS)):
        try:
            ray.init(
                address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR,
                runtime_env={"env_vars": {"PYTHONPATH": place}},
            )  # fmt: skip
            return
        except Exception:
            ray.shutdown()
            if not left:
                raise


def main() -> None:
    given = begin(__doc__, ranks=([1000], "multiples of 20, from 40"), seconds=(12.0, "how long each way is watched"))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 65536)), hard))
    _start_ray()
    print(head(TITLES))
    try:
        for ranks in given.ranks:
            measure(ranks, interval_s(ranks), given.seconds)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
