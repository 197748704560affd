"""How much of FSDP's traffic over a slow cable a step hides.

Run it with `python -m benchmarks.fsdp_overlap`. It needs root and 5 minutes. Two hosts (network
namespaces) have one core each. The weights are sharded over the hosts, so the all-gather at the
start of a step and the gradient sums at its end cross the cable. With pp 1, a rank has little to
compute meanwhile. With a pipeline inside each host (pp 2 × fsdp 2), the warm-up of the first stage
and the drain of the last hide some of the traffic. Each mesh runs as usual, and with an immediate
wait for weights and sums; raypp has no switch for that, so the benchmark patches it in. All
programs run at the same time and take turns, with and without a rate limit. The additional time of
a step with the limit is also divided by the time that its bytes need on the cable.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial
from typing import Any

from benchmarks.hosts import Hosts, some_hosts, spread
from benchmarks.kept import Kept, add_resume
from benchmarks.surroundings import announce
from benchmarks.turns import Held
from cluster.testbed import why_not

WARM = 2
"""Steps that are not counted, because buffers still grow."""
MESHES = {"pp 1 × fsdp 2": 1, "pp 2 × fsdp 2, pipelines inside the hosts": 2}
"""Ranks per host. They form a pipeline."""
VARIANTS = {(mesh, overlap): ranks for mesh, ranks in MESHES.items() for overlap in (True, False)}


def begin(hosts: Hosts, pp: int, overlap: bool, microbatches: int) -> Held:
    """Starts the ranks of a mesh and runs their first steps."""
    settings = [f"mesh={{pp: {pp}, fsdp: 2}}", f"pipeline.microbatches={microbatches}", "pipeline.lookahead=0",
                "checkpoint.memory_tier=false"]  # fmt: skip
    words = [word for setting in settings for word in ("--set", setting)]
    words += [] if overlap else ["--no-overlap"]
    held = hosts.hold("benchmarks.timed_rank", words, per_host=pp)
    held.steps(WARM)
    return held


def turn(hosts: Hosts, held: Held, mbit: float | None, steps: int) -> dict[str, float]:
    """Measures the seconds of a step, and the bytes that a host sends in a step."""
    hosts.set_cable(mbit)
    done = held.steps(steps)
    sent = statistics.mean(max(one.sent) for one in done)
    found = {"step_s": statistics.mean(one.seconds for one in done), "bytes": sent}
    print(f"{mbit or 'no limit'}: {found['step_s']:.3f} s, {sent / 1e6:.1f} MB", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2, help="steps of a turn")
    parser.add_argument("--rounds", type=int, default=6, help="turns of each mesh with each cable")
    parser.add_argument("--microbatches", type=int, default=4, help="of each of the two replicas")
    parser.add_argument("--cable-mbps", type=float, default=200.0, help="each host's cable, each way")
    add_resume(parser)
    options = parser.parse_args()
    announce()
    if why := why_not():
        raise SystemExit(why)
    names = ("steps", "microbatches", "cable_mbps")
    kept = Kept("fsdp_overlap", {name: getattr(options, name) for name in names}, resume=options.resume)
    found: dict[tuple[str, bool, bool], list[dict[str, Any]]] = {}
    with some_hosts("fs") as hosts:
        hosts.set_cable(None)
        held = {one: begin(hosts, ranks, one[1], options.microbatches) for one, ranks in VARIANTS.items()}
        for number in range(options.rounds):
            turns = [(*one, limited) for one in VARIANTS for limited in (False, True)]
            for mesh, overlap, limited in turns if number % 2 == 0 else turns[::-1]:
                mbit = options.cable_mbps if limited else None
                once = partial(turn, hosts, held[mesh, overlap], mbit, options.steps)
                key = f"round {number}: {mesh}, {'overlapped' if overlap else 'waited for'}, {mbit}"
                found.setdefault((mesh, overlap, limited), []).append(kept.once(key, once))
        for one in held.values():
            one.close()
    print(f"\n{kept.begun}\n\ncables of {options.cable_mbps:g} Mbit/s, ", end="")
    print(f"{options.microbatches} microbatches per replica, {options.rounds} rounds of {options.steps} steps")
    titles = ("mesh", "weights and sums", "no limit, s per step", "on the cable", "waited for ÷ it")
    print(f"\n| {' | '.join(titles)} | MB per step a host sends | s they need | of it hidden |")
    print("|---|---|---|---|---|---|---|---|")
    for mesh, overlap in VARIANTS:
        free, slow, other = found[mesh, overlap, False], found[mesh, overlap, True], found[mesh, False, True]
        needed = [one["bytes"] * 8 / (options.cable_mbps * 1e6) for one in slow]
        hidden = [1 - (b["step_s"] - a["step_s"]) / n for a, b, n in zip(free, slow, needed, strict=True)]
        gained = [a["step_s"] / b["step_s"] for a, b in zip(other, slow, strict=True)]
        seconds = [statistics.median(one["step_s"] for one in runs) for runs in (free, slow)]
        size = statistics.median(one["bytes"] for one in slow) / 1e6
        print(f"| {mesh} | {'overlapped' if overlap else 'waited for'} | {seconds[0]:.3f} | {seconds[1]:.3f} "
              f"| {spread(gained)} | {size:.1f} | {statistics.median(needed):.2f} | {spread(hidden)} |")  # fmt: skip


if __name__ == "__main__":
    main()
