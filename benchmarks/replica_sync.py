"""Sums of gradients over replicas on a slow cable: beside the backward, after it, and in int8.

Run it with `python -m benchmarks.replica_sync`. It needs root, four cores and 12 minutes. Four
hosts (network namespaces) with one core each train dp_replicate 2 × pp 2. Each has one card for
messages between stages and sums over replicas. The rate of the cables is set so that a message
takes 0.5 and 1.0 times a forward. The programs:

- after: FSDP's own sums, awaited after the last backward (what raypp did before).
- beside, at once: sums start in the last backward of every stage, also of one that has its last
  gradient still to send.
- beside: those of a stage that still sends start when its last gradient has left
  (`pipeline.wire`). This is what raypp does.
- int8: beside, in int8 with error feedback (`train.sync`).

All run at the same time and train in turns of a few steps, round after round, every second round in
reverse order, so values that are compared were measured within a minute. A ratio compares two turns
of the same round; the table shows the median over the rounds and the range. The steps without a
limit of the cable are those of `beside`.

`--losses N` trains N steps on text instead, on this machine's loopback, with exact and int8 sums
and with outer steps, with as many replicas as `--replicas` says and equal tokens, and compares the
losses. The last row is the control: one of the replicas alone, which sees its own tokens only. With
`--part-after K`, all but that begin with K steps with exact sums. None of it depends on the
machine's load.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from benchmarks.hosts import Hosts, some_hosts, spread
from benchmarks.link_hiding import message_bits
from benchmarks.surroundings import announce
from benchmarks.turns import Held, Turn
from benchmarks.wire import document, train
from cluster.testbed import why_not

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
MICROBATCHES_OF_ALL = 4
"""Microbatches of a step, of all replicas, in `--losses`, unless `--microbatches` is given."""
LAST = 20
"""The final loss is the mean over this many steps."""

Figures = dict[str, float]
"""Results of one turn: `step_s`, and `mb` that a host sends per step."""


def begin(hosts: Hosts, program: str, microbatches: int) -> Held:
    """Starts a program without a limit of the cables, and runs its first steps."""
    settings = (MESH, "checkpoint.memory_tier=false", "pipeline.lookahead=1", f"pipeline.microbatches={microbatches}")
    arguments = [word for setting in settings for word in ("--set", setting)]
    held = hosts.hold("benchmarks.timed_rank", ["--cut", "5,3", *arguments, *PROGRAMS[program]])
    held.steps(WARM)
    return held


def figures(steps: Sequence[Turn]) -> Figures:
    return {
        "step_s": statistics.mean(one.seconds for one in steps),
        "mb": statistics.mean(max(one.sent) for one in steps) / 1e6,
    }


def forward_s(steps: Sequence[Turn], microbatches: int) -> float:
    """Returns the time of a forward, from steps without a limit: a backward takes twice as long."""
    pipeline = statistics.mean(one.told[0]["parts"]["pipeline"] for one in steps)
    return pipeline / (3 * (microbatches + 1))


def measure(hosts: Hosts, options: argparse.Namespace) -> dict[float, list[dict[str, Figures]]]:
    """Returns the figures of every round, by share of a forward that a message takes."""
    hosts.set_cable(None)
    held = {program: begin(hosts, program, options.microbatches) for program in PROGRAMS}
    found: dict[float, list[dict[str, Figures]]] = {}
    for share in options.shares:
        for number in range(options.rounds):
            hosts.set_cable(None)
            held[BESIDE].steps(1)  # the first step after others have run is slower
            free = held[BESIDE].steps(options.steps)
            mbit = message_bits() / (share * forward_s(free, options.microbatches)) / 1e6
            hosts.set_cable(mbit)
            one = {NO_LIMIT: figures(free)}
            for program in list(PROGRAMS) if number % 2 == 0 else list(PROGRAMS)[::-1]:
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
    print("\n| message ÷ forward | program | s per step | speed, no limit = 1 | speed, after = 1 | MB a host sends |")
    print("|---|---|---|---|---|---|")
    for share, rounds in found.items():
        for program in PROGRAMS:
            seconds, size = (statistics.median(one[program][key] for one in rounds) for key in ("step_s", "mb"))
            ratios = [
                spread([one[base]["step_s"] / one[program]["step_s"] for one in rounds]) for base in (NO_LIMIT, AFTER)
            ]
            print(f"| {share} | {program} | {seconds:.3f} | {ratios[0]} | {ratios[1]} | {size:.1f} |")


def job_of(sync: dict[str, Any], replicas: int, steps: int, seed: int, microbatches: int) -> dict[str, Any]:
    job = document({}, steps, seed)
    job["mesh"] = {"dp_replicate": replicas}
    job["pipeline"]["microbatches"] = microbatches
    job["train"]["sync"] = sync
    return job


def compare_losses(options: argparse.Namespace) -> None:
    steps, every, others = options.losses, options.every, options.sync
    counted = f"mean of the last {min(LAST, steps)} of {steps} steps"
    print(f"\n| replicas | train.sync | loss, {counted} | difference | held-out loss | difference |")
    print("|---|---|---|---|---|---|")
    syncs: dict[str, dict[str, Any]] = {form: {"kind": form} for form in ("exact", "int8")}
    for form in ("none", "int8", "int4"):
        syncs[f"outer, {every} steps, {form}"] = {"kind": "outer", "every_steps": every, "compression": form}
    spread_out = {"fragments": 2, "overlap_steps": every // 10}
    for form in ("none", "int4"):
        one = syncs[f"outer, {every} steps, {form}"]
        syncs[f"outer, {every} steps, {form}, 2 fragments, {every // 10} steps ahead"] = one | spread_out
    if others:
        syncs = {"exact": {"kind": "exact"}}
        for words in others:
            syncs |= yaml.safe_load(words)
    for number in options.replicas:
        own = options.microbatches or MICROBATCHES_OF_ALL // number
        rows = [(name, number, syncs[name], 0) for name in syncs]
        if not others:
            rows.append(("exact, another seed", number, syncs["exact"], 1))
        rows.append(("one replica alone", 1, syncs["exact"], 0))
        exact: dict[str, Any] | None = None
        with TemporaryDirectory() as folder:
            for row, (name, world, sync, seed) in enumerate(rows):
                job, store = job_of(sync, world, steps, seed, own), None
                if options.part_after and world == number and not seed:
                    job["checkpoint"]["every_steps"], store = options.part_after, Path(folder, str(row))
                    if row:
                        shutil.copytree(Path(folder, "0"), store)
                        for step in range(2 * options.part_after, steps + 1, options.part_after):
                            shutil.rmtree(store / job["name"] / f"step-{step:08d}")
                found = train(job, world, name, store)
                exact = exact or found
                last, base = (statistics.mean(one["loss"][-LAST:]) for one in (found, exact))
                held_out = f"{found['held_out']:.4f} | {found['held_out'] / exact['held_out'] - 1:+.1%}"
                print(f"| {number} | {name} | {last:.4f} | {last - base:+.4f} | {held_out} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2, help="steps of each turn")
    parser.add_argument("--rounds", type=int, default=5, help="turns of every program on every cable")
    parser.add_argument("--shares", nargs="*", type=float, default=[0.5, 1.0], help="message ÷ forward of the cables")
    parser.add_argument("--microbatches", type=int, help=f"of each replica; {MICROBATCHES}, and {MICROBATCHES_OF_ALL} "
                        "of all with --losses")  # fmt: skip
    parser.add_argument("--sleeping-cores", action="store_true", help="do not keep the cores awake while they wait")
    parser.add_argument("--losses", type=int, default=0, metavar="N", help="compare the losses of N steps instead")
    parser.add_argument("--every", type=int, default=50, help="with --losses: steps between outer steps")
    parser.add_argument("--replicas", nargs="*", type=int, default=[2, 4], help="with --losses: numbers of replicas")
    parser.add_argument(
        "--part-after", type=int, default=0, metavar="K", help="with --losses: first train K steps with exact sums"
    )
    parser.add_argument(
        "--sync",
        action="append",
        default=[],
        metavar="'NAME: {kind: …}'",
        help="with --losses: only exact sums and this train.sync",
    )
    options = parser.parse_args()
    if options.part_after and options.losses % options.part_after:
        parser.error("--part-after must divide the steps of --losses")
    announce()
    if options.losses:
        compare_losses(options)
        return
    options.microbatches = options.microbatches or MICROBATCHES
    cores = len(os.sched_getaffinity(0))
    if reason := why_not() or (f"{cores} cores for {HOSTS} hosts" if cores < HOSTS else None):
        print(f"skipped: {reason}")
        return
    started = time.perf_counter()
    print(f"load before: {os.getloadavg()[0]:.1f}")
    with some_hosts("rs", HOSTS, awake=not options.sleeping_cores) as hosts:
        found = measure(hosts, options)
    report(found)
    print(f"\n{time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
