"""Compares predicted with measured step times.

It needs root. Two hosts (network namespaces) have one core each and a cable of a set rate. The
costs of the model's parts are measured on both cores at once, with the code of `raypp plan
--measure`. The step of every configuration is compared with what `raypp plan --costs --links`
predicts for two nodes with the speeds of the cores. Nothing is fitted to the runs. All
configurations run at the same time and take turns, as in `benchmarks.link_hiding`. Costs are
measured some seconds before and after each turn. The tables show medians over the rounds.

The cores are kept awake (`benchmarks.awake`). With `--sleeping-cores` they are not: the forecast
does not know that virtual cores come back slow from a wait.
"""

import argparse
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from benchmarks.hosts import Hosts, keys, pinned, some_hosts
from benchmarks.link_hiding import SLEEPING, TURNS
from benchmarks.surroundings import begin
from benchmarks.tables import head, spread
from benchmarks.timed_rank import job_of
from benchmarks.turns import Held, figures
from raypp.planning.costs import Costs, Part
from raypp.planning.forecast import Forecast, forecast
from raypp.planning.machines import Machines

LATENCY_S = 2e-4
UNLIMITED_GBPS = 20.0
"""The rate between two namespaces without a limit."""
WARM = 2
"""Steps that are not counted, because buffers still grow."""
GOAL = 0.1

ALONE = "checkpoint.memory_tier=false"
"""Turns off snapshots over the cable: the forecast does not include them."""
CONFIGURATIONS: list[tuple[list[str], float | None]] = [
    (["pipeline.lookahead=0"], None),
    (["pipeline.lookahead=0"], 300),
    (["pipeline.lookahead=0"], 100),
    (["pipeline.lookahead=1"], 100),
    (["pipeline.lookahead=2", "pipeline.microbatches=16"], 75),
    (["pipeline.schedule=gpipe", "pipeline.lookahead=0"], 150),
    (["pipeline.schedule=interleaved_1f1b", "pipeline.stages_per_rank=2", "pipeline.lookahead=0"], 150),
    (["pipeline.schedule=zbv", "pipeline.stages_per_rank=2", "pipeline.lookahead=0"], None),
    (["pipeline.lookahead=1", "pipeline.layers_per_stage=[4,4]"], 100),
    (["pipeline.lookahead=1", "pipeline.microbatches=4", "train.micro_batch_size=4"], 100),
    (["pipeline.lookahead=1", "pipeline.wire={compression: int8}"], 50),
    (["mesh={pp: 1, fsdp: 2}", "pipeline.microbatches=4", "pipeline.lookahead=0"], 300),
]


def hold_meters(settings: Sequence[str]) -> Held:
    """Measures costs in turns, on both cores at once. They depend on `settings`."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    held = Held([(pinned(core, "benchmarks.timed_costs", keys(*settings)), environment) for core in range(2)], list)
    held.steps(WARM)
    return held


def measured_costs(meters: Mapping[str, Held], kind: str) -> list[dict[str, Any]]:
    """Measures the current costs on both cores."""
    (done,) = meters[kind].steps(1)
    return [one["costs"] for one in done.told]


def mean_of(answers: list[dict[str, Any]]) -> Costs:
    """Returns the mean of several measurements of costs."""

    def of(name: str) -> float:
        return float(statistics.mean(answer[name] for answer in answers))

    layer, first, last = (
        Part(*(statistics.mean(answer[name][way] for answer in answers) for way in ("forward", "backward")))
        for name in ("layer", "first", "last")
    )
    numbers: dict[str, Any] = {one.name: of(one.name) for one in fields(Costs) if isinstance(one.default, float)}
    return Costs(layer, first, last, measured=True, **numbers)


def rows_of(index: int) -> str:
    """Returns the settings of a configuration that costs depend on; may be empty."""
    return next((setting for setting in CONFIGURATIONS[index][0] if setting.startswith("train.micro_batch_size")), "")


def started(hosts: Hosts, settings: Sequence[str], mbit: float | None) -> Held:
    """Starts the ranks of a configuration and runs their first steps."""
    hosts.set_cable(mbit)
    held = hosts.hold("benchmarks.timed_rank", keys(*settings, ALONE))
    held.steps(WARM)
    return held


def predicted(settings: list[str], mbit: float | None, around: Sequence[list[dict[str, Any]]]) -> Forecast:
    """Predicts the time of a step. `around`: the costs of both cores before and after the turn."""
    own = [mean_of([both[core] for both in around]) for core in range(2)]
    costs = mean_of([answer for both in around for answer in both])
    machines = Machines.alike(2, 1, mbit / 1e3 if mbit else UNLIMITED_GBPS, LATENCY_S)
    nodes = tuple(
        replace(node, speed=(costs.layer.forward + costs.layer.backward) / (one.layer.forward + one.layer.backward))
        for node, one in zip(machines.nodes, own, strict=True)
    )
    return forecast(job_of(settings, world=2, steps=1), replace(machines, nodes=nodes), costs)


Pair = tuple[dict[str, float], Forecast]
"""The `seconds` of a step and of its `pipeline`, and the prediction from the costs around it."""


def measure(hosts: Hosts, options: argparse.Namespace) -> dict[int, list[Pair]]:
    """Returns one pair per round for each configuration."""
    found: dict[int, list[Pair]] = {index: [] for index in options.only}
    held: dict[int, Held] = {}
    for index in options.only:
        held[index] = started(hosts, *CONFIGURATIONS[index])
    meters = {kind: hold_meters(kind.split()) for kind in set(map(rows_of, options.only))}
    for number in range(options.rounds):
        last: tuple[str, list[dict[str, Any]]] | None = None  # kind and costs of the latest measurement
        for index in options.only[:: -1 if number % 2 else 1]:
            settings, mbit = CONFIGURATIONS[index]
            kind = rows_of(index)
            before = last[1] if last is not None and last[0] == kind else measured_costs(meters, kind)
            hosts.set_cable(mbit)
            done = held[index].steps(options.steps)
            pipeline_s = statistics.mean(one.told[0]["parts"].get("pipeline", 0.0) for one in done)
            taken = {"seconds": figures(done)["step_s"], "pipeline": pipeline_s}
            after = measured_costs(meters, kind)
            last = kind, after
            cast = predicted(settings, mbit, [before, after])
            found[index].append((taken, cast))
            print(f"round {number}: {', '.join(settings)} at {mbit}: {taken['seconds']:.3f} s, "
                  f"predicted {cast.step_s:.3f} s", flush=True)  # fmt: skip
    for one in (*held.values(), *meters.values()):
        one.close()
    return found


def main() -> None:
    everything = range(len(CONFIGURATIONS))
    only = (list(everything), "some of the configurations, by their number from 0 on", everything)
    options = begin(__doc__, **TURNS, **SLEEPING, only=only)
    with some_hosts("pr", awake=not options.sleeping_cores) as hosts:
        found = measure(hosts, options)
    cores = "as the machine has them" if options.sleeping_cores else "kept awake"
    print(f"\nrounds: {options.rounds}, of {options.steps} steps each; cores {cores}")
    titles = "configuration | cable | measured, s | predicted, s | predicted ÷ measured | the schedule alone"
    print(head(f"{titles} | the rest, s"))
    errors = []
    for index, pairs in found.items():
        settings, mbit = CONFIGURATIONS[index]
        ratios = [cast.step_s / taken["seconds"] for taken, cast in pairs]
        schedule = [cast.parts["pipeline"] / taken["pipeline"] for taken, cast in pairs]
        rests = [
            statistics.median(taken["seconds"] - taken["pipeline"] for taken, _ in pairs),
            statistics.median(cast.step_s - cast.parts["pipeline"] for _, cast in pairs),
        ]
        errors.append(abs(statistics.median(ratios) - 1))
        seconds = statistics.median(taken["seconds"] for taken, _ in pairs)
        guess = statistics.median(cast.step_s for _, cast in pairs)
        cable = f"{mbit:g} Mbit/s" if mbit else "no limit"
        print(f"| {', '.join(settings)} | {cable} | {seconds:.3f} | {guess:.3f} | {spread(ratios)} "
              f"| {spread(schedule)} | {rests[0]:.2f} measured, {rests[1]:.2f} predicted |")  # fmt: skip
    near = sum(error <= GOAL for error in errors)
    print(f"\nwithin {GOAL:.0%}: {near} of {len(errors)}; median error {statistics.median(errors):.0%}, "
          f"largest {max(errors):.0%}")  # fmt: skip


if __name__ == "__main__":
    main()
