"""The cost of a slow cable, and how much of it raypp hides.

It needs root. Two hosts (network namespaces) with one core each, or four with `--hosts 4`, are
connected by cables and a switch. The rate of a cable is set so that a message takes 0.5, 1.0 and
1.5 times a forward (four hosts: 1.0 and 2.0): real compute, real packets. A host between two others
sends an activation and a gradient for each microbatch, both through its one cable. On each cable,
the benchmark runs raypp with `lookahead: auto` and with int8 messages, and torch's own Schedule1F1B
(a bare script with the same model and cut); on two hosts also raypp with the classic warm-up, and
the same job with its weights sharded over both (FSDP only); on four also other cuts. raypp on a
cable without a limit is the reference.

`--paced` replaces computing by sleeping (`benchmarks.paced`). It needs hardly any core, so it runs
anywhere, and shows what the cables cost without what they cost the cores.

All programs run at the same time and train in turns of two steps, round after round, every second
round in reverse order. So the values that are compared were measured within half a minute, and the
rate of the cable follows the speed of the machine. A ratio compares two turns of the same round;
the tables show the median over the rounds and the range. No snapshots in memory travel over the
cable. The cores are kept awake (`benchmarks.awake`). With `--sleeping-cores` they are not, and a
program pays extra for each wait after which a core is slow.
"""

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.hosts import Hosts, some_hosts
from benchmarks.sizes import ROWS, SEQ_LEN, model_options
from benchmarks.surroundings import begin
from benchmarks.tables import head, spread
from benchmarks.turns import Held, Turn, figures

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
INT8, OWN = "raypp, auto, int8", "raypp, auto, own cut"
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
    OWN: (["benchmarks.timed_rank", *ALONE], UNTIL_CHOSEN),
    EARLY: (["benchmarks.timed_rank", "--cut", "3,2,2,1", *ALONE], UNTIL_CHOSEN),
}
"""The variants, and how many steps of each are not counted. CUT and HOSTS are filled in. EARLY is
for four hosts: as even a cut as raypp's own, with the longest stage first."""
CHOOSE = (AUTO, INT8, OWN, EARLY)
"""The variants that measure the cable at the start, so they restart for each cable."""
USUAL = {2: list(VARIANTS)[:5], 4: [AUTO, TORCH, INT8, OWN, EARLY]}
SLEEPING = {"sleeping_cores": (False, "do not keep the cores awake while they wait")}
TURNS = {"steps": (2, "of each turn"), "rounds": (5, "turns of every program on every cable")}

Figures = dict[str, Any]
"""Results of one turn: see `turns.figures`, and the cable's `mbit`."""


def arguments_of(variant: str, hosts: int, options: argparse.Namespace) -> list[str]:
    """Returns the module and the arguments of a variant. FSDP's replicas share the microbatches."""
    words = [word.replace("CUT", CUTS[hosts]).replace("HOSTS", str(hosts)) for word in VARIANTS[variant][0]]
    words += ["--pace", str(PACE_S)] if options.paced else []
    if variant == TORCH:
        return [*words, "--microbatches", str(MICROBATCHES)]
    return [*words, "--set", f"pipeline.microbatches={MICROBATCHES // hosts if variant == FSDP else MICROBATCHES}"]


def started(hosts: Hosts, variant: str, mbit: float | None, options: argparse.Namespace) -> tuple[Held, list[Turn]]:
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
        self._free, first = started(hosts, AUTO, None, options)
        # The times of a forward and a step change with the machine's speed, but their ratio does
        # not. The steps with timed forwards also probed the link and allocated memory; later steps
        # are alike.
        usual = statistics.mean(one.seconds for one in self._free.steps(UNTIL_CHOSEN))
        self.forward_of_step = statistics.mean(chosen(first)["details"]["forward_s"]) / usual
        self._staying = {
            variant: started(hosts, variant, None, options)[0] for variant in options.only if variant not in CHOOSE
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
                own[variant], first = started(self.hosts, variant, mbit, self.options)
                words = chosen(first)["message"] if variant == AUTO else words
        for number in range(self.options.rounds):
            self.hosts.set_cable(None)
            free = self._free.steps(self.options.steps)
            mbit, found = self._rate(share, free), {NO_LIMIT: {**figures(free), "mbit": None}}
            turns: list[tuple[str, str, float | None]] = [(variant, variant, mbit) for variant in self.options.only]
            if TORCH in own:
                turns.append((TORCH_FREE, TORCH, None))
            for name, variant, rate in turns[:: -1 if number % 2 else 1]:
                self.hosts.set_cable(rate)
                steps = own[variant].steps(1 if variant == FSDP else self.options.steps)
                found[name] = {**figures(steps), "mbit": rate}
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


def report(found: dict[float, dict[str, Any]], options: argparse.Namespace) -> None:
    """Prints the tables of seconds and ratios with the goals. `found`: by share of a forward."""
    print(f"\nP = {options.hosts}, m = {MICROBATCHES}, fp32, "
          f"{'stages that sleep' if options.paced else 'one core each'}; "
          f"a message {message_bits() / 8 / 1024:.0f} KiB; rounds: {options.rounds}, of {options.steps} steps each; "
          f"cores {'as the machine has them' if options.sleeping_cores else 'kept awake'}")  # fmt: skip
    titles = "message ÷ forward | cable | variant | s per step | no limit ÷ it (goal) | torch ÷ it (goal)"
    print(head(f"{titles} | MB per step that a host sends"))
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
    options = begin(
        __doc__,
        **TURNS,
        **SLEEPING,
        hosts=(2, "with a core each", list(CUTS)),
        paced=(False, "sleep instead of computing: what the cables cost"),
    )
    awake, options.only = not (options.sleeping_cores or options.paced), USUAL[options.hosts]
    with some_hosts("lk", options.hosts, awake=awake, share_cores=options.paced) as hosts:
        race = Race(hosts, options)
        found = {share: race.on_cable(share) for share in GOALS[options.hosts]}
        race.close()
    report(found, options)


if __name__ == "__main__":
    main()
