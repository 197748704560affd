"""The cost of a slow cable, and how much of it raypp hides.

Run it with `python -m benchmarks.link_hiding`. It needs root and 20 minutes. Two hosts (network
namespaces) with one core each, or four with `--hosts 4`, are connected by cables and a switch. The
rate of a cable is set so that a message takes 0.5, 1.0 and 1.5 times a forward (four hosts: 1.0 and
2.0): real compute, real packets. A host between two others sends an activation and a gradient for
each microbatch, both through its one cable. On each cable, the benchmark runs
raypp with `lookahead: auto`, with the classic warm-up, and with int8 messages; torch's own
Schedule1F1B (a bare script with the same model and cut); and the same job with its weights sharded
over all hosts instead (FSDP only). raypp on a cable without a limit is the reference. Four hosts
need four cores, and by default run only raypp with auto, with int8, and torch's.

`--paced` replaces computing by sleeping (`benchmarks.paced`). It needs hardly any core, so it runs
anywhere, and shows what the cables cost without what they cost the cores.

All programs run at the same time and train in turns of two steps, round after round, every second
round in reverse order. So the values that are compared were measured within half a minute, and the
rate of the cable follows the speed of the machine. A ratio compares two turns of the same round;
the tables show the median over the rounds and the range. No snapshots in memory travel over the
cable, unless a variant says so. The cores are kept awake (`benchmarks.awake`). With
`--sleeping-cores` they are not, and a program pays extra for each wait after which a core is slow.
"""

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.hosts import Hosts, some_hosts, spread
from benchmarks.sizes import ROWS, SEQ_LEN, model_options
from benchmarks.surroundings import announce
from benchmarks.turns import Held, Turn
from cluster.testbed import why_not

MICROBATCHES = 16
CUTS = {2: "5,3", 4: "2,2,2,2"}
"""By number of hosts: the layers of each."""
GOALS = {2: {0.5: (0.92, 1.3), 1.0: (0.88, 1.45), 1.5: (0.84, 1.7)}, 4: {1.0: (0.88, 1.6), 2.0: (0.75, 1.8)}}
"""By number of hosts and message ÷ forward: the lowest speed relative to an unlimited cable, and to
torch's Schedule1F1B on the same cable."""
INT8_GOALS = {4: {2.0: 0.93}}
"""The same for int8 messages: relative to an unlimited cable."""
PACE_S = 0.018
"""Seconds that a layer's forward sleeps with `--paced`: about as long as it computes."""
UNTIL_CHOSEN = 4
"""raypp times steps 2 and 3 and uses the chosen lookahead from step 4 on."""

AUTO, TORCH, FSDP = "raypp, lookahead auto", "torch Schedule1F1B", "FSDP only"
INT8, SNAPSHOTS = "raypp, auto, int8", "raypp, auto, snapshots"
OWN = "raypp, auto, own cut"
EARLY = "raypp, auto, cut 3,2,2,1"
NO_LIMIT, TORCH_FREE = "raypp, no limit", "torch, no limit"
ALONE = ["--set", "checkpoint.memory_tier=false"]
RAYPP = ["benchmarks.timed_rank", "--cut", "CUT", *ALONE]
SHARDED = ["benchmarks.timed_rank", *ALONE, "--set", "mesh={pp: 1, fsdp: HOSTS}", "--set", "pipeline.lookahead=0"]
VARIANTS: dict[str, tuple[list[str], int]] = {
    AUTO: (RAYPP, UNTIL_CHOSEN),
    TORCH: (["benchmarks.bare_1f1b", "--cut", "CUT"], 2),
    INT8: ([*RAYPP, "--set", "pipeline.wire={compression: int8}"], UNTIL_CHOSEN),
    "raypp, lookahead 0": ([*RAYPP, "--set", "pipeline.lookahead=0"], 2),
    FSDP: (SHARDED, 1),
    "raypp, lookahead 1": ([*RAYPP, "--set", "pipeline.lookahead=1"], 2),
    "raypp, lookahead 3": ([*RAYPP, "--set", "pipeline.lookahead=3"], 2),
    SNAPSHOTS: ([*RAYPP, "--set", "checkpoint.memory_tier=true"], UNTIL_CHOSEN),
    OWN: (["benchmarks.timed_rank", *ALONE], UNTIL_CHOSEN),
    EARLY: (["benchmarks.timed_rank", "--cut", "3,2,2,1", *ALONE], UNTIL_CHOSEN),
}
"""The variants, and how many steps of each are not counted. CUT and HOSTS are filled in. EARLY is
for four hosts: as even a cut as raypp's own, with the longest stage first."""
CHOOSE = (AUTO, INT8, SNAPSHOTS, OWN, EARLY)
"""The variants that measure the cable at the start, so they restart for each cable."""
USUAL = {2: list(VARIANTS)[:5], 4: [AUTO, TORCH, INT8, OWN, EARLY]}

Figures = dict[str, Any]
"""Results of one turn: `step_s`, `mb` that a host sends per step, and the cable's `mbit`."""


def arguments_of(variant: str, hosts: int, options: argparse.Namespace) -> list[str]:
    """Returns the module and the arguments of a variant. FSDP's replicas share the microbatches."""
    words = [word.replace("CUT", CUTS[hosts]).replace("HOSTS", str(hosts)) for word in VARIANTS[variant][0]]
    microbatches = options.microbatches
    words += ["--pace", str(PACE_S)] if options.paced else []
    if variant == TORCH:
        return [*words, "--microbatches", str(microbatches)]
    return [*words, "--set", f"pipeline.microbatches={microbatches // hosts if variant == FSDP else microbatches}"]


def begin(hosts: Hosts, variant: str, mbit: float | None, options: argparse.Namespace) -> tuple[Held, list[Turn]]:
    """Starts a program on a cable; returns it and its first steps."""
    module, *arguments = arguments_of(variant, hosts.count, options)
    hosts.set_cable(mbit)
    held = hosts.hold(module, arguments)
    return held, held.steps(VARIANTS[variant][1])


def chosen(first: Sequence[Turn]) -> dict[str, Any]:
    """Returns raypp's event about its chosen lookahead: `message` and `details`."""
    return next(event for event in first[-1].told[0]["events"] if event["kind"] == "lookahead")


def message_bits() -> int:
    return ROWS * SEQ_LEN * model_options().hidden_size * 4 * 8


class Race:
    """The running programs. Some of them run for all cables."""

    def __init__(self, hosts: Hosts, options: argparse.Namespace) -> None:
        self.hosts, self.options = hosts, options
        self._free, first = begin(hosts, AUTO, None, options)
        # The times of a forward and a step change with the machine's speed, but their ratio does
        # not. The steps with timed forwards also probed the link and allocated memory; later steps
        # are alike.
        usual = statistics.mean(one.seconds for one in self._free.steps(UNTIL_CHOSEN))
        self.forward_of_step = statistics.mean(chosen(first)["details"]["forward_s"]) / usual
        self._staying = {
            variant: begin(hosts, variant, None, options)[0] for variant in options.only if variant not in CHOOSE
        }

    def _rate(self, share: float, steps: Sequence[Turn]) -> float:
        """Returns the Mbit/s at which a message takes that share of a forward of `steps`, which
        have just run without a limit."""
        forward = self.forward_of_step * statistics.mean(one.seconds for one in steps)
        return message_bits() / (share * forward) / 1e6

    def on_cable(self, share: float) -> dict[str, Any]:
        """Runs all `rounds` on cables of a share; returns their figures, and what was `told`."""
        self.hosts.set_cable(None)
        mbit = self._rate(share, self._free.steps(4))
        own, words, rounds = dict(self._staying), "", []
        for variant in self.options.only:
            if variant in CHOOSE:
                own[variant], first = begin(self.hosts, variant, mbit, self.options)
                words = chosen(first)["message"] if variant == AUTO else words
        for number in range(self.options.rounds):
            self.hosts.set_cable(None)
            free = self._free.steps(self.options.steps)
            mbit, found = self._rate(share, free), {NO_LIMIT: _figures(free, None)}
            turns: list[tuple[str, str, float | None]] = [(variant, variant, mbit) for variant in self.options.only]
            if TORCH in own:
                turns.append((TORCH_FREE, TORCH, None))
            for name, variant, rate in turns if number % 2 == 0 else turns[::-1]:
                self.hosts.set_cable(rate)
                found[name] = _figures(own[variant].steps(1 if variant == FSDP else self.options.steps), rate)
            rounds.append(found)
            seconds = ", ".join(f"{name} {one['step_s']:.2f}" for name, one in found.items())
            print(f"{mbit:.1f} Mbit/s, round {number}: {seconds}", flush=True)
        for variant in CHOOSE:
            if variant in own:
                own[variant].close()
        return {"told": words, "rounds": rounds}

    def close(self) -> None:
        for held in (self._free, *self._staying.values()):
            held.close()


def _figures(steps: Sequence[Turn], mbit: float | None) -> Figures:
    sent = statistics.mean(max(one.sent) for one in steps) / 1e6
    return {"step_s": statistics.mean(one.seconds for one in steps), "mb": sent, "mbit": mbit}


def measure(hosts: Hosts, options: argparse.Namespace) -> dict[float, dict[str, Any]]:
    """Returns by share of a forward: `told` (the choice), and the figures of all `rounds`."""
    race = Race(hosts, options)
    found = {share: race.on_cable(share) for share in options.shares}
    race.close()
    return found


def report(found: dict[float, dict[str, Any]], options: argparse.Namespace) -> None:
    """Prints the tables of seconds and ratios with the goals."""
    print(f"\nP = {options.hosts}, m = {options.microbatches}, fp32, "
          f"{'stages that sleep' if options.paced else 'one core each'}; "
          f"a message {message_bits() / 8 / 1024:.0f} KiB; rounds: {options.rounds}, of {options.steps} steps each; "
          f"cores {'as the machine has them' if options.sleeping_cores else 'kept awake'}")  # fmt: skip
    print("\n| message ÷ forward | cable | variant | s per step | no limit ÷ it (goal) | torch ÷ it (goal) "
          "| MB per step that a host sends |")  # fmt: skip
    print("|---|---|---|---|---|---|---|")
    for share, cable in found.items():
        rounds = cable["rounds"]
        for variant in [NO_LIMIT, *options.only, *([TORCH_FREE] if TORCH in options.only else [])]:
            goal = [""] * 2
            if variant == AUTO:
                goal = [f" (≥ {value})" for value in GOALS[options.hosts].get(share, ())] or goal
            if variant == INT8 and share in INT8_GOALS.get(options.hosts, {}):
                goal = [f" (≥ {INT8_GOALS[options.hosts][share]})", ""]
            against = f"{_ratios(rounds, TORCH, variant)}{goal[1]}" if TORCH in options.only else ""
            seconds, size = (statistics.median(one[variant][key] for one in rounds) for key in ("step_s", "mb"))
            rates = [one[variant]["mbit"] for one in rounds]
            rate = "no limit" if rates[0] is None else f"{min(rates):.0f} to {max(rates):.0f} Mbit/s"
            print(f"| {share} | {rate} | {variant} | {seconds:.3f} "
                  f"| {_ratios(rounds, NO_LIMIT, variant)}{goal[0]} | {against} | {size:.1f} |")  # fmt: skip
    for share, cable in found.items():
        print(f"\n{share}: {cable['told']}")


def _ratios(rounds: Sequence[dict[str, Figures]], base: str, variant: str) -> str:
    """Returns how many times faster a variant is than `base`, for each round."""
    return spread([one[base]["step_s"] / one[variant]["step_s"] for one in rounds])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2, choices=list(CUTS), help="hosts, with a core each")
    parser.add_argument("--steps", type=int, default=2, help="steps of each turn")
    parser.add_argument("--rounds", type=int, default=5, help="turns of every variant on every cable")
    parser.add_argument("--only", nargs="*", choices=list(VARIANTS), help="some of the variants")
    parser.add_argument("--shares", nargs="*", type=float, help="message ÷ forward of the cables")
    parser.add_argument("--microbatches", type=int, default=MICROBATCHES)
    parser.add_argument("--sleeping-cores", action="store_true", help="do not keep the cores awake while they wait")
    parser.add_argument("--paced", action="store_true", help="sleep instead of computing: what the cables cost")
    options = parser.parse_args()
    announce()
    options.shares = options.shares or list(GOALS[options.hosts])
    options.only = options.only or USUAL[options.hosts]
    cores, few = len(os.sched_getaffinity(0)), ""
    if cores < options.hosts and not options.paced:
        few = f"{options.hosts} hosts need {options.hosts} cores, and there are {cores}; --paced runs on any number"
    if reason := why_not() or few:
        print(f"skipped: {reason}")
        return
    started = time.perf_counter()
    with some_hosts("lk", options.hosts, awake=not (options.sleeping_cores or options.paced)) as hosts:
        found = measure(hosts, options)
    report(found, options)
    print(f"\n{time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
