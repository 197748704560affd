"""All schedules on slow cables, with and without a lookahead.

Run it with `python -m benchmarks.schedules_on_cables`. By default it computes: each schedule is
simulated without a limit and on cables on which a message takes 0.5, 1.0 and 2.0 times a forward of
a rank, that is of all its layers. So a column is one cable for all schedules: with two stages per
rank, a message takes twice as long in forwards of a stage, and there are twice as many. Ranks are
equal, a backward takes two forwards, and the two ends of a cable share it with nobody.

`--measure 1.0 zbv dualpipev` measures cells of the table, with real compute and real packets. It
needs root and a core per host. Hosts (network namespaces, two, or four with `--hosts 4`) have one
core each. Each schedule runs with `lookahead: auto` and with lookahead 0 on the cable, and with
auto on a cable without a limit. All programs run at the same time and take turns of two steps,
every second round in reverse order. Before each turn the rate is set from the steps just taken
without a limit.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.hosts import Hosts, some_hosts, spread
from benchmarks.kept import Kept, add_resume
from benchmarks.link_hiding import UNTIL_CHOSEN, chosen, message_bits
from benchmarks.surroundings import announce
from benchmarks.turns import Held, Turn
from cluster.testbed import why_not
from raypp.mesh.seating import place_stages
from raypp.planning.choose_lookahead import Depth, best_depth, depths
from raypp.schedules.catalogue import SCHEDULES, build_program, schedule_named
from raypp.schedules.communication import sent_by
from raypp.schedules.simulate import Simulator, StageTimes

SHARES = (0.5, 1.0, 2.0)
"""Message ÷ forward of a rank, of the table's cables."""
FREE = 0.0
AUTO, CLASSIC, NO_LIMIT = "lookahead auto", "lookahead 0", "no limit"


@dataclass(frozen=True)
class Sizes:
    """The pipeline of a table.

    Attributes:
        pp: Pipeline ranks.
        stages_per_rank: Of schedules that allow it; others take the nearest number.
        microbatches: Per step.
        halves: Both halves of a split backward, relative to the whole one.
    """

    pp: int
    stages_per_rank: int
    microbatches: int
    halves: float = 1.0

    @property
    def compute(self) -> float:
        """A step of a rank that never waits, in forwards of a rank."""
        return 3.0 * self.microbatches

    def times(self, stages_per_rank: int, share: float) -> StageTimes:
        """Returns times in forwards of a rank."""
        stages = self.pp * stages_per_rank
        forward, half = 1 / stages_per_rank, self.halves / 2
        return StageTimes([forward] * stages, [2 * forward] * stages, half, share, half, first_whole=True)


@dataclass(frozen=True)
class Cell:
    """A schedule on a cable.

    Attributes:
        classic: The step with lookahead 0, relative to a rank that never waits.
        best: The same with the lookahead that `auto` would choose.
        lookahead: That lookahead.
        in_flight: Microbatches in flight on the rank with most: a rank's layers count as one.
        classic_in_flight: The same with lookahead 0.
    """

    classic: float
    best: float
    lookahead: int
    in_flight: float
    classic_in_flight: float


def simulated(name: str, sizes: Sizes, share: float) -> Cell:
    """Simulates a schedule on a cable, with the depth that `lookahead: auto` would choose."""
    each = schedule_named(name).nearest_stages(sizes.stages_per_rank)

    def simulator(lookahead: int) -> Simulator:
        return Simulator(build_program(name, sizes.pp, each, sizes.microbatches, lookahead))

    found = depths(simulator, sizes.microbatches, sizes.times(each, share))
    best = best_depth(found)

    def held(depth: Depth) -> float:
        return max(depth.timeline.in_flight_on_rank) / each

    step_s = (found[0].step_s / sizes.compute, best.step_s / sizes.compute)
    return Cell(*step_s, best.lookahead, held(best), held(found[0]))


def busiest_channel(name: str, sizes: Sizes) -> float:
    """Returns the messages per microbatch on the busiest channel from one rank to another."""
    kind = schedule_named(name)
    each = kind.nearest_stages(sizes.stages_per_rank)
    program = build_program(name, sizes.pp, each, sizes.microbatches)
    placement = place_stages(sizes.pp, sizes.pp * each, kind.placement)
    rank_of = {stage: rank for rank, stages in enumerate(placement) for stage in stages}
    ranks = [rank_of[stage] for stage in range(len(rank_of))]
    crossed: dict[tuple[int, int], int] = {}
    for rank, actions in program.items():
        for action in actions:
            if (message := sent_by(action, ranks, rank_of)) is not None:
                channel = rank, ranks[message.to_stage]
                crossed[channel] = crossed.get(channel, 0) + 1
    return max(crossed.values()) / sizes.microbatches


def print_simulated(sizes: Sizes) -> None:
    """Prints the table of all schedules."""
    print(f"\nSimulated: P = {sizes.pp}, m = {sizes.microbatches}, {sizes.stages_per_rank} stages per rank where the "
          f"schedule allows it; halves of a backward {sizes.halves:g} × the whole. A step, relative to a rank that "
          "never waits: lookahead 0 → lookahead auto (the depth); the bound of the cable itself where it is above 1. "
          "In flight: microbatches of the rank with most, at 1.0.")  # fmt: skip
    titles = ["no limit", *(f"message {share}" for share in SHARES), "in flight"]
    print(f"\n| schedule | {' | '.join(titles)} |")
    print("|---|" + "---|" * len(titles))
    for name in SCHEDULES.names():
        cells = {share: simulated(name, sizes, share) for share in (FREE, *SHARES)}
        channel = busiest_channel(name, sizes)
        words = []
        for share, cell in cells.items():
            bound = channel * share / 3
            said = f"; cable {bound:.2f}" if bound > 1 else ""
            deeper = f" → **{cell.best:.2f}** ({cell.lookahead})" if cell.lookahead else ""
            words.append(f"{cell.classic:.2f}{deeper}{said}")
        whole = cells[1.0]
        held = f"{whole.classic_in_flight:g}" + (f" → {whole.in_flight:g}" if whole.lookahead else "")
        print(f"| {name} | {' | '.join(words)} | {held} |")


Figures = Mapping[str, float]
"""Seconds per step by variant, of one round of one schedule; `mbit` is the cable's rate."""


class Race:
    """The running programs of some schedules on cables of one share.

    Args:
        hosts: The hosts that run them.
        share: Message ÷ forward of a rank.
        schedules: Their names.
        options: `steps` per turn and `microbatches`.
    """

    def __init__(self, hosts: Hosts, share: float, schedules: Sequence[str], options: argparse.Namespace) -> None:
        self.hosts, self.share, self.options, self.schedules = hosts, share, options, list(schedules)
        self._held: dict[tuple[str, str], Held] = {}
        self._forward_of_step: dict[str, float] = {}
        self.words: dict[str, str] = {}
        for name in self.schedules:
            self._begin_free(name)
        for name in self.schedules:
            self.hosts.set_cable(self._rate(self._held[name, NO_LIMIT].steps(2), name))
            self._held[name, AUTO], first = self._begin(name, "auto")
            self.words[name] = chosen(first)["message"]
            self._held[name, CLASSIC], _ = self._begin(name, "0")

    def _begin_free(self, name: str) -> None:
        """Starts a schedule without a limit; measures the share of a rank's forward in a step."""
        self.hosts.set_cable(None)
        held, first = self._begin(name, "auto")
        self._held[name, NO_LIMIT] = held
        usual = statistics.mean(one.seconds for one in held.steps(UNTIL_CHOSEN))
        forward = sum(chosen(first)["details"]["forward_s"]) / self.hosts.count
        self._forward_of_step[name] = forward / usual

    def _begin(self, name: str, lookahead: str) -> tuple[Held, list[Turn]]:
        settings = {
            "checkpoint.memory_tier": "false", "pipeline.schedule": name, "pipeline.lookahead": lookahead,
            "pipeline.stages_per_rank": str(schedule_named(name).nearest_stages(2)),
            "pipeline.microbatches": str(self.options.microbatches),
        }  # fmt: skip
        words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        held = self.hosts.hold("benchmarks.timed_rank", words)
        return held, held.steps(UNTIL_CHOSEN)

    def _rate(self, steps: Sequence[Turn], name: str) -> float:
        """Returns the Mbit/s at which a message takes the share of a rank's forward."""
        forward = self._forward_of_step[name] * statistics.mean(one.seconds for one in steps)
        return message_bits() / (self.share * forward) / 1e6

    def round(self, number: int) -> dict[str, Figures]:
        """Returns the seconds of every schedule's variants in one round."""
        found: dict[str, Figures] = {}
        for name in self.schedules[:: -1 if number % 2 else 1]:
            self.hosts.set_cable(None)
            free = self._held[name, NO_LIMIT].steps(self.options.steps)
            mbit = self._rate(free, name)
            one = {"mbit": mbit, NO_LIMIT: statistics.mean(step.seconds for step in free)}
            self.hosts.set_cable(mbit)
            for variant in (AUTO, CLASSIC)[:: -1 if number % 2 else 1]:
                steps = self._held[name, variant].steps(self.options.steps)
                one[variant] = statistics.mean(step.seconds for step in steps)
            found[name] = one
            seconds = ", ".join(f"{variant} {one[variant]:.2f} s" for variant in (NO_LIMIT, AUTO, CLASSIC))
            print(f"round {number}: {name} at {mbit:.1f} Mbit/s: {seconds}", flush=True)
        return found

    def close(self) -> None:
        for held in self._held.values():
            held.close()


def measure(share: float, schedules: Sequence[str], options: argparse.Namespace) -> None:
    """Measures cells of the table and prints them beside their simulation."""
    cores = len(os.sched_getaffinity(0))
    if reason := why_not() or (f"{cores} cores for {options.hosts} hosts" if cores < options.hosts else None):
        print(f"skipped: {reason}")
        return
    named = {name: getattr(options, name) for name in ("hosts", "steps", "microbatches", "sleeping_cores")}
    kept = Kept("schedules_on_cables", {"share": share, "schedules": list(schedules), **named}, resume=options.resume)
    keys = [f"round {number}" for number in range(options.rounds)]
    missing = [number for number, key in enumerate(keys) if key not in kept]
    if missing:
        with some_hosts("sc", options.hosts, awake=not options.sleeping_cores) as hosts:
            race = Race(hosts, share, schedules, options)
            kept.keep("told", race.words)
            for number in missing:
                kept.keep(keys[number], race.round(number))
            race.close()
    report(share, schedules, [kept[key] for key in keys], kept["told"], options)
    print(f"\n{kept.begun}")


def report(
    share: float,
    schedules: Sequence[str],
    rounds: Sequence[Mapping[str, Figures]],
    told: Mapping[str, str],
    options: argparse.Namespace,
) -> None:
    """Prints the measured cells: shares of the speed without a limit, beside the simulated ones."""
    sizes = Sizes(options.hosts, 2, options.microbatches)
    print(f"\nMeasured: P = {options.hosts}, m = {options.microbatches}, a message takes {share} of a rank's forward; "
          f"rounds: {options.rounds}, of {options.steps} steps; "
          f"cores {'as the machine has them' if options.sleeping_cores else 'kept awake'}")  # fmt: skip
    print("\n| schedule | cable | no limit, s | lookahead auto, s | no limit ÷ it (simulated) | lookahead 0, s "
          "| no limit ÷ it (simulated) | lookahead 0 ÷ auto |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|")
    for name in schedules:
        found = [one[name] for one in rounds]
        free, slow = simulated(name, sizes, FREE), simulated(name, sizes, share)

        def of(above: str, below: str, found: Sequence[Any] = found) -> str:
            return spread([one[above] / one[below] for one in found])

        seconds = {key: statistics.median(one[key] for one in found) for key in (NO_LIMIT, AUTO, CLASSIC)}
        rates = [one["mbit"] for one in found]
        print(f"| {name} | {min(rates):.0f} to {max(rates):.0f} Mbit/s | {seconds[NO_LIMIT]:.3f} | {seconds[AUTO]:.3f} "
              f"| {of(NO_LIMIT, AUTO)} ({free.best / slow.best:.2f}) | {seconds[CLASSIC]:.3f} "
              f"| {of(NO_LIMIT, CLASSIC)} ({free.best / slow.classic:.2f}) | {of(CLASSIC, AUTO)} |")  # fmt: skip
    for name in schedules:
        print(f"\n{name}: {told[name]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pp", type=int, default=4, help="ranks of the computed table")
    parser.add_argument("--stages-per-rank", type=int, default=2, help="stages per rank of the computed table")
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--halves", type=float, default=1.0, help="both halves of a backward ÷ the whole, computed")
    parser.add_argument("--measure", nargs="+", metavar="WORD", help="a share and names of schedules to measure")
    parser.add_argument("--hosts", type=int, default=2, choices=(2, 4), help="hosts of measured cells")
    parser.add_argument("--rounds", type=int, default=4, help="turns of each program")
    parser.add_argument("--steps", type=int, default=2, help="steps of a turn")
    parser.add_argument("--sleeping-cores", action="store_true", help="do not keep the cores awake while they wait")
    add_resume(parser)
    options = parser.parse_args()
    announce()
    print_simulated(Sizes(options.pp, options.stages_per_rank, options.microbatches, options.halves))
    if options.measure is None:
        return
    share, *names = options.measure
    unknown = sorted(set(names) - set(SCHEDULES.names()))
    if unknown or not names or not _is_number(share):
        known = ", ".join(SCHEDULES.names())
        parser.error(f"--measure takes a share and schedules, such as 1.0 zbv; schedules: {known}")
    measure(float(share), names, options)


def _is_number(word: str) -> bool:
    try:
        return float(word) > 0
    except ValueError:
        return False


if __name__ == "__main__":
    main()
