"""Two sites with a slow, long link between them: exact and int8 sums against outer steps.

Run it with `python -m benchmarks.sites`. It needs root and 10 minutes. Two hosts at each site have
1 Gbit/s cables; the link between the sites has 20 Mbit/s and a round trip of 50 ms. Each site is a
replica of pp 2. Stages sleep instead of computing (`benchmarks.paced`), so two cores are enough;
all messages and exchanges are real.

The table has the seconds of a step, over whole periods of outer steps, and the speed, compared with
exact sums without a limit of any cable.
"""

import argparse
import statistics
from typing import Any

from benchmarks.hosts import Hosts, some_hosts
from benchmarks.surroundings import announce
from cluster.testbed import why_not

MESH = "mesh={pp: 2, dp_replicate: 2}"
FAR = (1, 3)
"""The hosts of the second replica's two ranks: pp is the slowest axis."""


def programs(every: int) -> dict[str, str]:
    """Returns `train.sync` of each program."""
    named = {"exact": "{kind: exact}", "int8": "{kind: int8}"}
    for compression in ("none", "int8", "int4"):
        named[f"outer, {compression}"] = f"{{kind: outer, every_steps: {every}, compression: {compression}}}"
    named["outer, int4, 5 steps beside"] = f"{{kind: outer, every_steps: {every}, compression: int4, overlap_steps: 5}}"
    parts = f"{{kind: outer, every_steps: {every // 4 * 4}, compression: int8, fragments: 4, overlap_steps: 5}}"
    return named | {"outer, int8, 4 fragments, 5 steps beside": parts}


def run(hosts: Hosts, sync: str, steps: int, warm: int, options: argparse.Namespace) -> dict[str, Any]:
    """Returns the mean seconds of a step, and the MB per step that host 0 sends."""
    settings = (MESH, f"train.sync={sync}", "checkpoint.memory_tier=false", "pipeline.lookahead=1")
    arguments = [word for setting in settings for word in ("--set", setting)]
    paced = ["--pace", str(options.layer_s), "--cut", "5,3", "--no-save", "--steps", str(warm + steps)]
    ranks = hosts.run("benchmarks.timed_rank", [*paced, *arguments])
    mean = statistics.mean(statistics.mean(one["wall"][warm:]) for one in ranks)
    return {"step_s": mean, "mb": max(one["sent"] for one in ranks) / (warm + steps) / 1e6}


def report(free_s: float, found: dict[str, dict[str, Any]]) -> None:
    print("\n| train.sync | s per step | speed, no limit = 1 | MB a host sends per step |")
    print("|---|---|---|---|")
    print(f"| exact, no limit | {free_s:.3f} | 1.00 | |")
    for name, one in found.items():
        print(f"| {name} | {one['step_s']:.3f} | {free_s / one['step_s']:.2f} | {one['mb']:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="20mbit", help="of the link between the sites")
    parser.add_argument("--round-trip-ms", type=float, default=50.0)
    parser.add_argument("--layer-s", type=float, default=0.004, help="seconds of a layer's forward")
    parser.add_argument("--every", type=int, default=50, help="steps between two outer steps")
    parser.add_argument("--periods", type=int, default=2, help="periods of outer steps that are timed")
    parser.add_argument("--only", default="", help="programs whose names contain this")
    options = parser.parse_args()
    announce()
    if reason := why_not():
        print(f"skipped: {reason}")
        return
    found: dict[str, dict[str, Any]] = {}
    with some_hosts("st", 4) as hosts:
        free_s = run(hosts, "{kind: exact}", 10, 3, options)["step_s"]
        hosts.set_cable(1000)
        with hosts.network.far_apart(FAR, options.rate, options.round_trip_ms / 2e3):
            for name, sync in programs(options.every).items():
                outer = name.startswith("outer")
                if options.only in name:
                    found[name] = run(hosts, sync, options.periods * options.every if outer else 5, 3, options)
                    print(name, found[name], flush=True)
    report(free_s, found)


if __name__ == "__main__":
    main()
