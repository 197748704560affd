"""Predicted step times beside measured ones: `python -m benchmarks.prediction`. Needs root; about 6 minutes.

Two hosts (network namespaces) with one core each and a cable of a set rate. The costs of the model's parts are measured
first, on both cores at once, as `raypp plan --measure` does; then every configuration is run for a few steps, and its
median step is compared with what `raypp plan --costs --link-gbps` says. Nothing is fitted to the runs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from typing import Any

from benchmarks.link_hiding import VARIANTS, Hosts, step_seconds
from benchmarks.surroundings import describe
from benchmarks.timed_rank import job_of
from cluster.testbed import Network, why_not
from raypp.planning.costs import Costs, Part
from raypp.planning.forecast import forecast
from raypp.planning.machines import Machines
from raypp.spec.load import job_document

LATENCY_S = 2e-4
UNLIMITED_GBPS = 20.0
"""What two namespaces reach without a limit."""
WARM = 3
"""Steps that are not counted: buffers grow, and `auto` chooses its depth."""

CONFIGURATIONS: list[tuple[list[str], float | None]] = [
    (["pipeline.lookahead=0"], None),
    (["pipeline.lookahead=0"], 300),
    (["pipeline.lookahead=0"], 100),
    (["pipeline.lookahead=1"], 100),
    (["pipeline.lookahead=2", "pipeline.microbatches=16"], 75),
    (["pipeline.schedule=gpipe"], 150),
    (["pipeline.schedule=interleaved_1f1b", "pipeline.stages_per_rank=2"], 150),
    (["pipeline.schedule=zbv", "pipeline.stages_per_rank=2"], None),
    (["pipeline.lookahead=1", "pipeline.layers_per_stage=[4,4]"], 100),
    (["pipeline.lookahead=1", "pipeline.microbatches=4", "train.micro_batch_size=4"], 100),
    (["pipeline.lookahead=1", "pipeline.wire={compression: int8}"], 50),
    (["mesh={pp: 1, fsdp: 2}", "pipeline.microbatches=4"], 300),
]


def measured_costs() -> dict[tuple[str, ...], Costs]:
    """Costs by the settings that they depend on (rows of a microbatch), each the mean of both cores."""
    found = {}
    for rows in ((), ("train.micro_batch_size=4",)):
        job = job_of(rows, world=1, steps=4)
        request = json.dumps({"job": job_document(job), "device": "cpu"})
        program = "import sys; from raypp.train.measure import main; sys.exit(main())"
        both = [
            subprocess.Popen(["taskset", "-c", str(core % (os.cpu_count() or 1)), sys.executable, "-c", program],
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for core in range(2)
        ]  # fmt: skip
        for process in both:
            assert process.stdin is not None
            process.stdin.write(request)
            process.stdin.close()
        answers = []
        for process in both:
            assert process.stdout is not None
            answers.append(json.loads(process.stdout.read().strip().splitlines()[-1]))
            process.wait()
        found[rows] = _mean(answers)
    return found


def _mean(answers: list[dict[str, Any]]) -> Costs:
    def of(name: str) -> float:
        return statistics.mean(answer[name] for answer in answers)

    layer, first, last = (
        Part(*(statistics.mean(answer[name][way] for answer in answers) for way in ("forward", "backward")))
        for name in ("layer", "first", "last")
    )
    return Costs(layer, first, last, of("optimizer_s"), of("step_s"), of("copy_s"), measured=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    if why := why_not():
        raise SystemExit(why)
    costs = measured_costs()
    rows = []
    network = Network.make("predict", 2)
    try:
        hosts = Hosts(network)
        for settings, mbit in CONFIGURATIONS:
            for host in range(2):
                network.set_rate(host, f"{mbit}mbit" if mbit else "none")
            job = job_of(settings, world=2, steps=options.steps)
            own = tuple(setting for setting in settings if setting.startswith("train.micro_batch_size"))
            machines = Machines.alike(2, 1, mbit / 1e3 if mbit else UNLIMITED_GBPS, LATENCY_S)
            predicted = forecast(job, machines, costs[own])
            name = ", ".join(settings)
            VARIANTS[name] = (["benchmarks.timed_rank", *(w for s in settings for w in ("--set", s))], WARM)
            seconds = step_seconds(name, hosts.run(name, options.steps))
            rows.append((name, mbit, seconds, predicted.step_s))
            print(f"{name} at {mbit}: {seconds:.3f} s, predicted {predicted.step_s:.3f} s", flush=True)
    finally:
        network.remove()
    print(f"\n{describe()}\n")
    print("| configuration | cable | measured, s | predicted, s | predicted ÷ measured |")
    print("|---|---|---|---|---|")
    for name, mbit, seconds, guess in rows:
        cable = f"{mbit:g} Mbit/s" if mbit else "no limit"
        print(f"| {name} | {cable} | {seconds:.3f} | {guess:.3f} | {guess / seconds:.2f} |")
    errors = [abs(guess / seconds - 1) for _, _, seconds, guess in rows]
    near = sum(error <= 0.1 for error in errors)
    print(
        f"\nwithin 10 %: {near} of {len(rows)}; median error {statistics.median(errors):.0%}, largest {max(errors):.0%}"
    )


if __name__ == "__main__":
    main()
