"""How much a save slows the steps during it on a slow cable, with and without throttling.

Run it with `python -m benchmarks.pacing`. It needs root and 8 minutes. Two hosts (network
namespaces) with one core each train with pp 2 over a cable of a set rate. An S3 server at their
switch takes the saves, so every upload shares its host's cable with the pipeline's messages. Each
run has one save in the middle; the steps during the save are divided by the steps before it. The
variants are: no save; a save at the full rate of the cable; a save with
`checkpoint.max_upload_mbps`, whose pieces wait while a message is under way; the same, but its
pieces do not wait; and, without a save, snapshots in memory that are copied to the other host.
Every second round runs them in reverse order.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.hosts import Hosts, some_hosts, spread
from benchmarks.kept import Kept, add_resume
from benchmarks.surroundings import announce
from cluster.testbed import why_not
from raypp.clusters.seaweed import SeaweedServer

BUCKET = "bench"
WARM = 2
"""Steps that are not counted, because buffers still grow."""
NO_SAVE, FAST, SNAPSHOTS = "no save", "a save, not paced", "no save, snapshots in memory"
PACED, STUBBORN = "a save, paced", "a save, paced, not giving way"
VARIANTS = (NO_SAVE, FAST, PACED, STUBBORN, SNAPSHOTS)


def run(hosts: Hosts, server: SeaweedServer, options: argparse.Namespace, variant: str, number: int) -> dict[str, Any]:
    """Runs a variant; returns the seconds of the steps before and after the save, and its facts."""
    half = WARM + options.steps
    saves = variant in (FAST, PACED, STUBBORN)
    settings = {
        "checkpoint.every_steps": half if saves else 0,
        "checkpoint.max_upload_mbps": options.upload_mbps if variant in (PACED, STUBBORN) else 0,
        "checkpoint.memory_tier": str(variant == SNAPSHOTS).lower(),
        "pipeline.lookahead": 2,
        "pipeline.microbatches": options.microbatches,
    }
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    hosts.set_cable(options.cable_mbps)
    # Without a save in the middle, the last save goes into a directory, so it does not use the
    # cable.
    more = {**server.environment(), "BENCH_STORE": f"s3://{BUCKET}/{VARIANTS.index(variant)}-{number}"} if saves else {}
    words += ["--no-yield"] if variant == STUBBORN else []
    ranks = hosts.run("benchmarks.timed_rank", [*words, "--steps", str(half + options.steps)], more)
    wall = ranks[0]["wall"]
    commits = [event["details"] for event in ranks[0]["events"] if event["kind"] == "committed"]
    found = {"before": wall[WARM:half], "after": wall[half:], "commit": commits[0] if saves else None}
    found["mb"] = [rank["sent"] / 1e6 for rank in ranks]
    print(f"{variant}: {statistics.median(found['before']):.3f} s per step before, "
          f"{statistics.mean(found['after']):.3f} s after", flush=True)  # fmt: skip
    return found


def row(variant: str, runs: list[dict[str, Any]], none: list[dict[str, Any]]) -> str:
    """Formats a line of the table: medians over the rounds, with their range."""
    base = [statistics.median(one["before"]) for one in runs]
    mean = [statistics.mean(one["after"]) / before for one, before in zip(runs, base, strict=True)]
    slowest = [max(one["after"]) / before for one, before in zip(runs, base, strict=True)]
    extra = [sum(one["after"]) - len(one["after"]) * before for one, before in zip(runs, base, strict=True)]
    whole = [
        statistics.mean(one["before"] + one["after"]) / statistics.mean(free["before"] + free["after"])
        for one, free in zip(runs, none, strict=True)
    ]
    commits = [one["commit"] for one in runs if one["commit"]]
    upload = f"{statistics.median(c['bytes'] / 1e6 for c in commits):.0f} MB, " if commits else ""
    upload += f"{statistics.median(c['seconds'] for c in commits):.1f} s" if commits else "–"
    upload += f", {statistics.median(c['yielded_s'] for c in commits):.1f} s given way" if variant == PACED else ""
    size = " / ".join(f"{statistics.median(one['mb'][host] for one in runs):.0f}" for host in range(2))
    seconds = statistics.median(base)
    return (f"| {variant} | {seconds:.3f} | {spread(mean)} | {spread(slowest)} | {statistics.median(extra):.1f} "
            f"| {upload} | {spread(whole)} | {size} |")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=18, help="counted steps before the save, and as many after it")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--cable-mbps", type=float, default=64.0, help="each host's cable, each way")
    parser.add_argument("--upload-mbps", type=float, default=25.0, help="checkpoint.max_upload_mbps of the paced save")
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    add_resume(parser)
    options = parser.parse_args()
    announce()
    if why := why_not():
        raise SystemExit(why)
    names = ("steps", "microbatches", "cable_mbps", "upload_mbps")
    kept = Kept("pacing", {name: getattr(options, name) for name in names}, resume=options.resume)
    wanted = [variant for variant in VARIANTS if variant in {NO_SAVE, *options.only}]
    found: dict[str, list[dict[str, Any]]] = {variant: [] for variant in wanted}
    with some_hosts("up") as hosts, tempfile.TemporaryDirectory() as folder:
        server = SeaweedServer.start(Path(folder) / "s3", buckets=(BUCKET,), host=hosts.network.switch)
        try:
            for number in range(options.rounds):
                for variant in wanted if number % 2 == 0 else wanted[::-1]:
                    once = partial(run, hosts, server, options, variant, number)
                    found[variant].append(kept.once(f"round {number}: {variant}", once))
        finally:
            server.stop()
    print(f"\n{kept.begun}\n")
    print(f"pp 2, m = {options.microbatches}, fp32, one core each, cables of {options.cable_mbps:g} Mbit/s; ", end="")
    print(
        f"paced: max_upload_mbps {options.upload_mbps:g}; {options.steps} steps from the save's beginning on; the bytes"
    )
    print("of the runs with saves are those of two, of which the second is after the last step")
    print("\n| variant | s per step before | step after ÷ before, mean | slowest | s that the save cost | save "
          "| all steps ÷ no save | MB each host sent |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|")
    for variant in wanted:
        print(row(variant, found[variant], found[NO_SAVE]))


if __name__ == "__main__":
    main()
