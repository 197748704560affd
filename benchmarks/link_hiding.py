"""What a slow cable costs, and what raypp hides of it: `python -m benchmarks.link_hiding`. Needs root; 12 min a round.

Two hosts (network namespaces) with one core each, joined by a cable whose rate is set so that a message takes 0.5, 1.0
and 1.5 times a forward: real compute, real packets. On each cable, one after another: raypp with `lookahead: auto`,
with the classic warm-up, with int8 messages, torch's own Schedule1F1B (a bare script of the same model and cut), and
the same job with its weights sharded over both hosts instead (FSDP only). Beside each cable stands a run on a cable
without a limit, which those on it are divided by: so what is compared was measured within minutes. Every second round
goes through the variants backwards. No snapshots in memory travel over the cable, unless a variant says so.

The table for more ranks is the simulator's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.kept import Kept, add_resume
from benchmarks.sizes import ROWS, SEQ_LEN, model_options
from benchmarks.torch_1f1b_on_paper import torch_1f1b_s
from benchmarks.two_hosts import Hosts, spread, step_seconds, two_hosts
from cluster.testbed import why_not
from raypp.schedules.one_f_one_b import build
from raypp.schedules.simulate import StageTimes, simulate

MICROBATCHES, CUT = 16, "5,3"
GOALS = {0.5: (0.92, 1.3), 1.0: (0.88, 1.45), 1.5: (0.84, 1.7)}
"""By message ÷ forward: of an unlimited cable at least, and of torch's Schedule1F1B on the same cable at least."""
UNTIL_CHOSEN = 4
"""raypp times steps 2 and 3 and has its depth from step 4 on."""

AUTO, TORCH, FSDP = "raypp, lookahead auto", "torch Schedule1F1B", "FSDP only"
NO_LIMIT = "no limit"
ALONE = ["--set", "checkpoint.memory_tier=false"]
RAYPP = ["benchmarks.timed_rank", "--cut", CUT, *ALONE]
SHARDED = ["benchmarks.timed_rank", *ALONE, "--set", "mesh={pp: 1, fsdp: 2}", "--set", "pipeline.lookahead=0"]
VARIANTS: dict[str, tuple[list[str], int]] = {
    AUTO: (RAYPP, UNTIL_CHOSEN),
    TORCH: (["benchmarks.bare_1f1b", "--cut", CUT], 1),
    "raypp, auto, int8": ([*RAYPP, "--set", "pipeline.wire={compression: int8}"], UNTIL_CHOSEN),
    "raypp, lookahead 0": ([*RAYPP, "--set", "pipeline.lookahead=0"], 1),
    FSDP: (SHARDED, 1),
    "raypp, lookahead 1": ([*RAYPP, "--set", "pipeline.lookahead=1"], 1),
    "raypp, auto, snapshots": ([*RAYPP, "--set", "checkpoint.memory_tier=true"], UNTIL_CHOSEN),
}
"""What is run, and how many steps of it are not counted."""
USUAL = list(VARIANTS)[:5]


def count_of(variant: str, microbatches: int) -> list[str]:
    """Arguments for the number of microbatches, of which FSDP's two replicas share out those of the pipeline."""
    if variant == TORCH:
        return ["--microbatches", str(microbatches)]
    return ["--set", f"pipeline.microbatches={microbatches // 2 if variant == FSDP else microbatches}"]


def run(hosts: Hosts, variant: str, mbit: float | None, microbatches: int, steps: int) -> dict[str, Any]:
    """One run on one cable: `step_s`, `mb` per step that host 0 sent, and what raypp told of its choice."""
    (module, *arguments), extra = VARIANTS[variant]
    hosts.set_cable(mbit)
    ranks = hosts.run(module, [*arguments, *count_of(variant, microbatches), "--steps", str(steps + extra)])
    told = [event for event in ranks[0].get("events", []) if event["kind"] == "lookahead"]
    found = {"step_s": step_seconds(ranks, extra), "mb": ranks[0]["sent"] / (steps + extra) / 1e6, "told": told[:1]}
    cable = f"{mbit:.1f} Mbit/s" if mbit else NO_LIMIT
    print(f"{cable}: {variant} {found['step_s']:.3f} s", flush=True)
    return found


def message_bits() -> int:
    return ROWS * SEQ_LEN * model_options().hidden_size * 4 * 8


def measure(hosts: Hosts, kept: Kept, options: argparse.Namespace) -> dict[str, Any]:
    """All variants on all cables, `rounds` times, beside each cable one without a limit."""
    one = partial(run, hosts, microbatches=options.microbatches, steps=options.steps)
    first = kept.once("first", partial(one, AUTO, None))
    forward = statistics.mean(first["told"][0]["details"]["forward_s"])
    rates = {share: message_bits() / (share * forward) / 1e6 for share in options.shares}
    found: dict[str, Any] = {"forward_s": forward, "rates": rates, NO_LIMIT: {AUTO: [], TORCH: []}, "cables": {}}
    for number in range(options.rounds):
        for share, rate in rates.items():
            order: list[tuple[str, float | None]] = [(AUTO, None), *((variant, rate) for variant in options.only)]
            for variant, mbit in order if number % 2 == 0 else order[::-1]:
                key = f"round {number}, {share} of a forward: {variant} {'on it' if mbit else 'without a limit'}"
                cable = found["cables"].setdefault(share, {NO_LIMIT: []})
                cable.setdefault(variant if mbit else NO_LIMIT, []).append(kept.once(key, partial(one, variant, mbit)))
        if TORCH in options.only:
            key = f"round {number}: {TORCH} without a limit"
            found[NO_LIMIT][TORCH].append(kept.once(key, partial(one, TORCH, None)))
    return found


def report(found: dict[str, Any], options: argparse.Namespace, begun: str) -> None:
    """Tables of seconds and ratios, with the goals, and the simulator's for more ranks."""
    print(f"\n{begun}")
    print(f"\nP = 2, m = {options.microbatches}, fp32, one core each; a message {message_bits() / 8 / 1024:.0f} KiB; "
          f"a forward of {found['forward_s'] * 1e3:.1f} ms (mean of the stages); rounds: {options.rounds}")  # fmt: skip
    free = [one["step_s"] for cable in found["cables"].values() for one in cable[NO_LIMIT]]
    theirs = [one["step_s"] for one in found[NO_LIMIT][TORCH]]
    print(f"No limit, s per step: raypp {spread(free)}" + (f", torch {spread(theirs)}" if theirs else ""))
    print("\n| message ÷ forward | cable | variant | s per step | no limit ÷ it (goal) | torch ÷ it (goal) "
          "| MB per step that a host sends |")  # fmt: skip
    print("|---|---|---|---|---|---|---|")
    for share, cable in found["cables"].items():
        for variant in options.only:
            runs, goal = cable[variant], ["", ""]
            if variant == AUTO:
                goal = [f" (≥ {value})" for value in GOALS.get(share, ())] or goal
            free_ratio = _ratios(cable[NO_LIMIT], runs)
            against = f"{_ratios(cable[TORCH], runs)}{goal[1]}" if TORCH in cable else ""
            seconds = statistics.median(one["step_s"] for one in runs)
            size = statistics.median(one["mb"] for one in runs)
            print(f"| {share} | {found['rates'][share]:.0f} Mbit/s | {variant} | {seconds:.3f} | {free_ratio}{goal[0]} "
                  f"| {against} | {size:.1f} |")  # fmt: skip
    for share, cable in found["cables"].items():
        for one in cable.get(AUTO, [])[:1]:
            print(f"\n{share}: {one['told'][0]['message']}")
    simulated()


def _ratios(base: Sequence[dict[str, Any]], runs: Sequence[dict[str, Any]]) -> str:
    """How many times faster than `base`, each round by itself."""
    return spread([a["step_s"] / b["step_s"] for a, b in zip(base, runs, strict=True)])


def simulated() -> None:
    """Four and eight ranks by the simulator: forward 1, backward 2, equal stages."""
    print("\nSimulated (forward 1, backward 2, equal stages): share of a free link's speed")
    print("\n| P | m | message ÷ forward | raypp, best lookahead | lookahead | torch Schedule1F1B | ratio |")
    print("|---|---|---|---|---|---|---|")
    for pp, microbatches in ((2, 16), (4, 32), (8, 64)):
        free = simulate(build(pp, 1, microbatches), StageTimes.equal(pp)).makespan
        for share in (0.5, 1.0, 1.5, 2.0):
            times = StageTimes.equal(pp, link=share)
            steps = [simulate(build(pp, 1, microbatches, depth), times).makespan for depth in range(5)]
            best = next(depth for depth, step in enumerate(steps) if step <= min(steps) * 1.01)
            theirs = torch_1f1b_s(pp, microbatches, 1.0, 2.0, share)
            print(f"| {pp} | {microbatches} | {share} | {free / steps[best]:.2f} | {best} | {free / theirs:.2f} "
                  f"| {theirs / steps[best]:.2f} |")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3, help="counted steps of each run")
    parser.add_argument("--rounds", type=int, default=1, help="times that everything is measured")
    parser.add_argument("--only", nargs="*", default=USUAL, choices=list(VARIANTS), help="some of the variants")
    parser.add_argument("--shares", nargs="*", type=float, default=list(GOALS), help="message ÷ forward of the cables")
    parser.add_argument("--microbatches", type=int, default=MICROBATCHES)
    parser.add_argument("--out", type=Path, help="write what was measured as JSON")
    add_resume(parser)
    options = parser.parse_args()
    if reason := why_not():
        print(f"skipped: {reason}")
        simulated()
        return
    started = time.perf_counter()
    kept = Kept("link_hiding", {"steps": options.steps, "microbatches": options.microbatches}, resume=options.resume)
    with two_hosts("lk") as hosts:
        found = measure(hosts, kept, options)
    report(found, options, kept.begun)
    print(f"\n{time.perf_counter() - started:.0f} s")
    if options.out:
        options.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
