"""Runs all benchmarks one after another: `python -m benchmarks.run`, or `make bench`.

Ratios compare values within a benchmark, on an otherwise idle machine. docs/benchmarks/README.md
has the goals and the figures so far.
"""

import argparse
import os
import subprocess
import sys
import time
from dataclasses import dataclass

from benchmarks.surroundings import OWN_LOAD


@dataclass(frozen=True)
class Benchmark:
    """A module that prints figures. `minutes`: about, with its defaults on two idle cores. `root`:
    it needs root, to create network namespaces."""

    name: str
    minutes: float
    shows: str
    root: bool = False


BENCHMARKS = (
    Benchmark("throughput", 6, "raypp's step compared with a bare Schedule1F1B script"),
    Benchmark("dispatch", 2, "the runtime's cost per microbatch compared with torch's classes"),
    Benchmark("block_host", 5, "what blocks that are not compiled, and an update, take the host"),
    Benchmark("tensor_parallel", 3, "a layer's cost to the ranks of a tp group, compared with torch's own"),
    Benchmark("kernel_counts", 1, "kernels and bytes of a layer's elementwise work, compiled or not; computed"),
    Benchmark("receives_on_paper", 1, "what receives in one order cost, and the processors they hold; computed"),
    Benchmark("startup", 5, "from submit to the first step, compared with torchrun"),
    Benchmark("saves", 5, "a save's stall, rate, memory and re-cut, compared with other writers"),
    Benchmark("link_hiding", 20, "how much of a slow cable is hidden, compared with torch's 1F1B and FSDP", root=True),
    Benchmark("sites", 10, "outer steps against sums over a link of 20 Mbit/s and 50 ms between two sites", root=True),
    Benchmark("outer_losses", 30, "losses of replicas that train apart, over 150 and 750 outer steps"),
    Benchmark("replica_sync", 12, "sums over replicas on a slow cable: beside the backward, in int8", root=True),
    Benchmark("prediction", 10, "predicted and measured step times", root=True),
    Benchmark("generate", 2, "tokens/s of decoding, compared with transformers"),
    Benchmark("wire", 7, "bytes and loss of compressed messages"),
    Benchmark("fp8_losses", 20, "loss and errors of products in fp8"),
    Benchmark("recovery", 8, "from a kill to the next step, compared with a cold start"),
    Benchmark("gpu_single", 3, "tokens/s, memory and MFU of one GPU; without one, a toy model on the CPU"),
    Benchmark("controller_scale", 4, "a controller's cost per rank, and how many ranks it supports"),
    Benchmark("line_scale", 2, "what the leader of a line costs while runs wait"),
)
PARTS = ("bare_1f1b", "recut_bytes", "save_rank", "timed_costs", "timed_rank")
"""Modules that a benchmark runs as separate processes."""


def main() -> int:
    """Runs the chosen benchmarks; returns 1 if any of them failed, after all have run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [one.name for one in BENCHMARKS]
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help="run these; see --list")
    parser.add_argument("--list", action="store_true", help="list the benchmarks and how long they take")
    given = parser.parse_args()
    chosen = [one for one in BENCHMARKS if given.only is None or one.name in given.only]
    if given.list:
        for one in chosen:
            print(f"{one.name:17} {one.minutes:3.0f} min  {one.shows}{' (needs root)' if one.root else ''}")
        print(f"{'together':17} {sum(one.minutes for one in chosen):3.0f} min, on two idle cores")
        return 0
    failed = []
    for one in chosen:
        print(f"\n== {one.name}: {one.shows}; about {one.minutes:g} minutes", flush=True)
        if one.root and os.geteuid() != 0:
            print("skipped: it needs root")
            continue
        started = time.monotonic()
        code = subprocess.run([sys.executable, "-m", f"benchmarks.{one.name}"], check=False).returncode
        os.environ[OWN_LOAD] = one.name
        print(f"== {one.name}: exit code {code} after {(time.monotonic() - started) / 60:.1f} minutes", flush=True)
        failed += [one.name] if code else []
    if failed:
        print(f"\nfailed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
