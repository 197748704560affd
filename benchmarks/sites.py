"""Two sites with a slow, long link between them: exact and int8 sums against outer steps.

It needs root. Two hosts at each site have 1 Gbit/s cables; the link between the sites has 20 Mbit/s
and a round trip of 50 ms. Each site is a replica of pp 2. Stages sleep instead of computing
(`benchmarks.paced`), so two cores are enough; all messages and exchanges are real.

The table has the seconds of a step, over whole periods of outer steps, and the speed, compared with
exact sums without a limit of any cable.
"""

import statistics
from typing import Any

from benchmarks.hosts import Hosts, keys, some_hosts
from benchmarks.surroundings import begin
from benchmarks.tables import head

MESH = "mesh={pp: 2, dp_replicate: 2}"
FAR = (1, 3)
"""The hosts of the second replica's two ranks: pp is the slowest axis."""


RATE, ROUND_TRIP_S, LAYER_S, EVERY = "20mbit", 0.05, 0.004, 50
"""The link between the sites, seconds of a layer's forward, and steps between two outer steps."""


def programs() -> dict[str, str]:
    """Returns `train.sync` of each program."""
    named = {"exact": "{kind: exact}", "int8": "{kind: int8}"}
    for compression in ("none", "int8", "int4"):
        named[f"outer, {compression}"] = f"{{kind: outer, every_steps: {EVERY}, compression: {compression}}}"
    named["outer, int4, 5 steps beside"] = f"{{kind: outer, every_steps: {EVERY}, compression: int4, overlap_steps: 5}}"
    parts = f"{{kind: outer, every_steps: {EVERY // 4 * 4}, compression: int8, fragments: 4, overlap_steps: 5}}"
    return named | {"outer, int8, 4 fragments, 5 steps beside": parts}


def run(hosts: Hosts, sync: str, steps: int, warm: int = 3) -> dict[str, Any]:
    """Returns the mean seconds of a step, and the MB per step that host 0 sends."""
    settings = keys(MESH, f"train.sync={sync}", "checkpoint.memory_tier=false", "pipeline.lookahead=1")
    paced = ["--pace", str(LAYER_S), "--cut", "5,3", "--no-save", "--steps", str(warm + steps)]
    ranks = hosts.run("benchmarks.timed_rank", [*paced, *settings])
    mean = statistics.mean(statistics.mean(one["wall"][warm:]) for one in ranks)
    return {"step_s": mean, "mb": max(one["sent"] for one in ranks) / (warm + steps) / 1e6}


def report(free_s: float, found: dict[str, dict[str, Any]]) -> None:
    print(head("train.sync | s per step | speed, no limit = 1 | MB a host sends per step"))
    print(f"| exact, no limit | {free_s:.3f} | 1.00 | |")
    for name, one in found.items():
        print(f"| {name} | {one['step_s']:.3f} | {free_s / one['step_s']:.2f} | {one['mb']:.2f} |")


def main() -> None:
    periods, only = (2, "periods of outer steps that are timed"), ("", "programs whose names contain this")
    options = begin(__doc__, periods=periods, only=only)
    found: dict[str, dict[str, Any]] = {}
    with some_hosts("st", 4, share_cores=True) as hosts:
        free_s = run(hosts, "{kind: exact}", 10)["step_s"]
        hosts.set_cable(1000)
        with hosts.network.far_apart(FAR, RATE, ROUND_TRIP_S / 2):
            for name, sync in programs().items():
                if options.only in name:
                    found[name] = run(hosts, sync, options.periods * EVERY if name.startswith("outer") else 5)
                    print(name, found[name], flush=True)
    report(free_s, found)


if __name__ == "__main__":
    main()
