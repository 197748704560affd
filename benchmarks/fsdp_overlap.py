"""How much of FSDP's traffic over a slow cable a step hides: `python -m benchmarks.fsdp_overlap`. Root; 4 minutes.

Two hosts (network namespaces) with one core each; the weights are sharded over the hosts, so that their gathering at
the start of a step and the sums of the gradients at its end cross the cable. Alone (pp 1) a rank has little to do
meanwhile; with a pipeline inside each host (pp 2 × fsdp 2) the warm-up of the first stage and the drain of the last
hide some. What a step takes longer than on a cable without a limit is divided by the time its bytes need on the cable.
There is no switch for it in raypp, so there is nothing to compare with but that.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial
from typing import Any

from benchmarks.kept import Kept, add_resume
from benchmarks.two_hosts import Hosts, spread, step_seconds, two_hosts
from cluster.testbed import why_not

WARM = 2
"""Steps that are not counted: buffers grow."""
MESHES = {"pp 1 × fsdp 2": 1, "pp 2 × fsdp 2, pipelines inside the hosts": 2}
"""Ranks per host, which are a pipeline."""


def run(hosts: Hosts, pp: int, mbit: float | None, microbatches: int, steps: int) -> dict[str, float]:
    """Seconds of a step, and bytes that a host sends in one."""
    hosts.set_cable(mbit)
    settings = [f"mesh={{pp: {pp}, fsdp: 2}}", f"pipeline.microbatches={microbatches}", "pipeline.lookahead=0",
                "checkpoint.memory_tier=false"]  # fmt: skip
    words = [word for setting in settings for word in ("--set", setting)]
    ranks = hosts.run("benchmarks.timed_rank", [*words, "--steps", str(steps + WARM)], per_host=pp)
    found = {"step_s": step_seconds(ranks, WARM), "bytes": max(rank["sent"] for rank in ranks) / (steps + WARM)}
    print(f"pp {pp} × fsdp 2 at {mbit or 'no limit'}: {found['step_s']:.3f} s", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4, help="counted steps of each run")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--microbatches", type=int, default=4, help="of each of the two replicas")
    parser.add_argument("--cable-mbps", type=float, default=200.0, help="each host's cable, each way")
    add_resume(parser)
    options = parser.parse_args()
    if why := why_not():
        raise SystemExit(why)
    names = ("steps", "microbatches", "cable_mbps")
    kept = Kept("fsdp_overlap", {name: getattr(options, name) for name in names}, resume=options.resume)
    found: dict[tuple[str, bool], list[dict[str, Any]]] = {}
    with two_hosts("fs") as hosts:
        for number in range(options.rounds):
            turns = [(mesh, limited) for mesh in MESHES for limited in (False, True)]
            for mesh, limited in turns if number % 2 == 0 else turns[::-1]:
                mbit = options.cable_mbps if limited else None
                once = partial(run, hosts, MESHES[mesh], mbit, options.microbatches, options.steps)
                found.setdefault((mesh, limited), []).append(kept.once(f"round {number}: {mesh}, {mbit}", once))
    print(f"\n{kept.begun}\n\ncables of {options.cable_mbps:g} Mbit/s, {options.microbatches} microbatches per replica")
    print("\n| mesh | no limit, s per step | on the cable | MB per step a host sends | s they need | of it hidden |")
    print("|---|---|---|---|---|---|")
    for mesh in MESHES:
        free, slow = found[mesh, False], found[mesh, True]
        needed = [one["bytes"] * 8 / (options.cable_mbps * 1e6) for one in slow]
        hidden = [1 - (b["step_s"] - a["step_s"]) / n for a, b, n in zip(free, slow, needed, strict=True)]
        seconds = [statistics.median(one["step_s"] for one in runs) for runs in (free, slow)]
        size = statistics.median(one["bytes"] for one in slow) / 1e6
        print(f"| {mesh} | {seconds[0]:.3f} | {seconds[1]:.3f} | {size:.1f} | {spread(needed)} | {spread(hidden)} |")


if __name__ == "__main__":
    main()
