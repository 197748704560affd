"""Sums of gradients over replicas on a slow cable: beside the backward, after it, and in int8.

It needs root and four cores. Four hosts (network namespaces) with one core each train dp_replicate
2 × pp 2. Each has one card for messages between stages and sums over replicas. The rate of the
cables is set so that a message takes 0.5 and 1.0 times a forward. The programs:

- after: FSDP's own sums, awaited after the last backward.
- beside, at once: sums start in the last backward of every stage, also of one that has its last
  gradient still to send.
- beside: those of a stage that still sends start when its last gradient has left (`pipeline.wire`).
  This is what raypp does.
- int8: beside, in int8 with error feedback (`train.sync`).

Turns, rounds and ratios are those of `benchmarks.link_hiding`. The steps without a limit of the
cable are those of `beside`.
"""

import argparse
import statistics
from collections.abc import Sequence

from benchmarks.hosts import Hosts, keys, some_hosts
from benchmarks.link_hiding import TURNS, Figures, message_bits
from benchmarks.surroundings import begin
from benchmarks.tables import head, spread
from benchmarks.turns import Held, Turn, figures

HOSTS, MICROBATCHES, WARM = 4, 8, 3
MESH = "mesh={pp: 2, dp_replicate: 2}"
AFTER, AT_ONCE, BESIDE, INT8 = "after", "beside, at once", "beside", "int8"
PROGRAMS: dict[str, list[str]] = {
    AFTER: ["--sums", "after"],
    AT_ONCE: ["--sums", "at-once"],
    BESIDE: [],
    INT8: ["--set", "train.sync={kind: int8}"],
}
NO_LIMIT = "beside, no limit"


def started(hosts: Hosts, program: str) -> Held:
    """Starts a program without a limit of the cables, and runs its first steps."""
    settings = keys(MESH, "checkpoint.memory_tier=false", "pipeline.lookahead=1")
    settings += keys(f"pipeline.microbatches={MICROBATCHES}")
    held = hosts.hold("benchmarks.timed_rank", ["--cut", "5,3", *settings, *PROGRAMS[program]])
    held.steps(WARM)
    return held


def forward_s(steps: Sequence[Turn]) -> float:
    """Returns the time of a forward, from steps without a limit: a backward takes twice as long."""
    pipeline = statistics.mean(one.told[0]["parts"]["pipeline"] for one in steps)
    return pipeline / (3 * (MICROBATCHES + 1))


def measure(hosts: Hosts, options: argparse.Namespace) -> dict[float, list[dict[str, Figures]]]:
    """Returns the figures of every round, by share of a forward that a message takes."""
    hosts.set_cable(None)
    held = {program: started(hosts, program) for program in PROGRAMS}
    found: dict[float, list[dict[str, Figures]]] = {}
    for share in options.shares:
        for number in range(options.rounds):
            hosts.set_cable(None)
            held[BESIDE].steps(1)  # the first step after others have run is slower
            free = held[BESIDE].steps(options.steps)
            mbit = message_bits() / (share * forward_s(free)) / 1e6
            hosts.set_cable(mbit)
            one = {NO_LIMIT: figures(free)}
            for program in list(PROGRAMS)[:: -1 if number % 2 else 1]:
                held[program].steps(1)
                one[program] = figures(held[program].steps(options.steps))
            found.setdefault(share, []).append(one)
            seconds = ", ".join(f"{name} {value['step_s']:.2f}" for name, value in one.items())
            print(f"{mbit:.1f} Mbit/s, round {number}: {seconds}", flush=True)
    hosts.set_cable(None)
    for ranks in held.values():
        ranks.close()
    return found


def report(found: dict[float, list[dict[str, Figures]]]) -> None:
    print(head("message ÷ forward | program | s per step | speed, no limit = 1 | speed, after = 1 | MB a host sends"))
    for share, rounds in found.items():
        for program in PROGRAMS:
            seconds, size = (statistics.median(one[program][key] for one in rounds) for key in ("step_s", "mb"))
            ratios = [
                spread([one[base]["step_s"] / one[program]["step_s"] for one in rounds]) for base in (NO_LIMIT, AFTER)
            ]
            print(f"| {share} | {program} | {seconds:.3f} | {ratios[0]} | {ratios[1]} | {size:.1f} |")


def main() -> None:
    options = begin(__doc__, **TURNS, shares=([0.5, 1.0], "message ÷ forward of the cables"))
    with some_hosts("rs", HOSTS) as hosts:
        found = measure(hosts, options)
    report(found)


if __name__ == "__main__":
    main()
