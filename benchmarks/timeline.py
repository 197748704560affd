"""What tracing costs: CPU time of a span, and pairs of a traced and an untraced step.

Run it with `python -m benchmarks.timeline`. The ranks run on this machine, each with one thread. In
each pair the order is drawn, so that a machine that becomes slower favours neither.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from benchmarks.awake import cores_awake
from benchmarks.surroundings import announce
from raypp.ports import free_port

WARM = 5


def job(pp: int, fsdp: int, microbatches: int, hidden: int, layers: int, seq_len: int) -> dict[str, Any]:
    """Returns the job: many small actions, where tracing costs most."""
    sizes = {"num_layers": layers, "hidden_size": hidden, "num_heads": 4, "ffn_size": 2 * hidden, "vocab_size": 512}
    return {
        "name": "timeline",
        "model": sizes,
        "data": {"kind": "synthetic", "seq_len": seq_len, "document_len": [seq_len, seq_len]},
        "mesh": {"pp": pp, "fsdp": fsdp},
        "pipeline": {"microbatches": microbatches, "lookahead": 0},
        "train": {"steps": 10**6, "micro_batch_size": 1},
    }


def rank_main(rank: int, world: int, port: int, document: dict[str, Any], pairs: int, results: Any) -> None:
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    import torch

    from raypp.pipeline.action_trace import ActionTrace
    from raypp.records import Requests
    from raypp.spec.load import parse_job
    from raypp.train.assemble import assemble
    from raypp.train.own_seat import local_seat
    from raypp.train.step import StepRunner, Stopwatch

    torch.set_num_threads(1)
    parsed = parse_job(document)
    order = random.Random(1)
    found = []
    with assemble(parsed, local_seat(rank, world, port, parsed), hang_timeout_s=120) as assembled:
        runner, runtime = StepRunner(assembled), assembled.built.runtime
        step = spans = 0

        def timed(traced: bool) -> float:
            nonlocal step, spans
            step += 1
            trace = ActionTrace(assembled.device, list(runtime.planned.values())) if traced else None
            runtime.trace, watch = trace, Stopwatch()
            torch.distributed.barrier()
            begun = time.perf_counter()
            runner.run(step, runner.read(Requests(), watch), watch)
            seconds = time.perf_counter() - begun
            if trace is not None:
                spans = len(trace.recorded)
                trace.close()
            return seconds

        for _ in range(WARM):
            timed(False)
            timed(True)
        for _ in range(pairs):
            first = order.random() < 0.5
            pair = {traced: timed(traced) for traced in (first, not first)}
            found.append((pair[True], pair[False]))
    if rank == 0:
        results.put((found, spans))


class _Stage:
    """What a trace asks of a stage."""

    stage_index = 0
    late_sums = None
    replica_sums = None

    def __init__(self) -> None:
        import torch

        self.submod = torch.nn.Linear(1, 1)


class _Arrived:
    """A message that is there."""

    def wait(self) -> None:
        pass


def span_costs(count: int = 20_000, rounds: int = 15) -> tuple[float, float]:
    """Returns the CPU seconds that tracing adds to an action and to a wait, medians of rounds."""
    import torch

    from raypp.pipeline.action_trace import ActionTrace
    from raypp.torch_private import Computation

    stage: Any = _Stage()
    work: Any = _Arrived()
    trace = ActionTrace(torch.device("cpu"), [stage])

    def nothing(stage: Any, microbatch: int) -> None:
        pass

    def seconds(do: Callable[[Any, int], Any]) -> float:
        begun = time.thread_time()
        for microbatch in range(count):
            do(stage, microbatch)
        taken = time.thread_time() - begun
        trace.recorded.clear()
        return taken / count

    action = trace.around({Computation.FORWARD: nothing})[Computation.FORWARD]
    actions = [seconds(action) - seconds(nothing) for _ in range(rounds)]
    waits = [
        seconds(lambda _, m: trace.wait("wait F", 0, m, work)) - seconds(lambda _, m: work.wait())
        for _ in range(rounds)
    ]
    return statistics.median(actions), statistics.median(waits)


def measure(name: str, document: dict[str, Any], pairs: int) -> str:
    """Returns a line of the table."""
    world = document["mesh"]["pp"] * document["mesh"]["fsdp"]
    context = multiprocessing.get_context("spawn")
    results, port = context.Queue(), free_port()
    ranks = [
        context.Process(target=rank_main, args=(rank, world, port, document, pairs, results)) for rank in range(world)
    ]
    for process in ranks:
        process.start()
    found, spans = results.get(timeout=600)
    for process in ranks:
        process.join()
    ratios = sorted(on / off for on, off in found)
    off = statistics.median(pair[1] for pair in found)
    low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
    middle = statistics.median(ratios)
    return f"| {name} | {off * 1e3:.1f} | {spans} | {middle - 1:+.2%} ({low - 1:+.1%} to {high - 1:+.1%}) |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--spans-only", action="store_true", help="measure the CPU time of a span only")
    parser.add_argument("--asleep", action="store_true", help="do not keep the cores awake")
    options = parser.parse_args()
    announce()
    cases = {
        "pp 2, 16 microbatches": job(2, 1, 16, 128, 4, 128),
        "pp 2 × fsdp 2, 8 microbatches": job(2, 2, 8, 128, 4, 128),
    }
    action, wait = span_costs()
    print(f"\nCPU time: {action * 1e6:.1f} µs per action, {wait * 1e6:.1f} µs per wait")
    if options.spans_only:
        return
    print("\n| mesh | step, ms | spans per rank | traced ÷ untraced, median of pairs (quartiles) |")
    print("|---|---|---|---|")
    with nullcontext() if options.asleep else cores_awake():
        for name, document in cases.items():
            print(measure(name, document, options.pairs), flush=True)


if __name__ == "__main__":
    main()
