"""What it costs to post receives as NCCL needs it, simulated, as a Markdown table.

Run it with `python -m benchmarks.receives_on_paper`. A message crosses once its receive is posted,
and a rank posts only between two actions. So this is the worst case: on a GPU the host runs ahead
of the device, and posts earlier.
"""

from __future__ import annotations

import argparse

from benchmarks.surroundings import announce
from raypp.mesh.seating import place_stages
from raypp.schedules.action import Program
from raypp.schedules.catalogue import SCHEDULES, build_program, schedule_named
from raypp.schedules.posting import with_messages
from raypp.schedules.simulate import StageTimes, simulate

LINKS, SPREAD = (0.25, 0.5, 1.0, 2.0), 0.2


def longer(program: Program, ranks: list[int], link: float, spread: float = 0.0) -> tuple[float, float]:
    """Returns by what fraction a step is longer than if all receives were posted at its start.

    Args:
        program: The actions of every rank.
        ranks: Pipeline rank of every stage.
        link: Time of a message, in forwards; a backward takes two.
        spread: Stages are in turn this much faster than, as fast as, and slower than the mean.

    Returns:
        With receives in one order, and three ahead.
    """
    forward = [1 + spread * (stage % 3 - 1) for stage in range(len(ranks))]
    times = StageTimes(forward, [2 * seconds for seconds in forward], link=link)
    free = simulate(program, times).makespan
    ordered, ahead = (
        simulate(program, times, with_messages(program, ranks, posting)).makespan / free - 1
        for posting in ("one_order", "ahead")
    )
    return ordered, ahead


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pp", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=16)
    options = parser.parse_args()
    announce()
    print(f"pp {options.pp}, {options.microbatches} microbatches; a step is longer by, in one order (three ahead):\n")
    names = [*(f"message {link}" for link in LINKS), f"message 1.0, stages ±{SPREAD:.0%}"]
    print(f"| schedule | lookahead | {' | '.join(names)} |")
    print("|---|" + "---|" * (len(names) + 1))
    for name in SCHEDULES.names():
        kind = schedule_named(name)
        each = kind.nearest_stages(2)
        placement = place_stages(options.pp, options.pp * each, kind.placement)
        holder = {stage: rank for rank, stages in enumerate(placement) for stage in stages}
        ranks = [holder[stage] for stage in range(options.pp * each)]
        seen: Program | None = None
        for lookahead in (0, 1, 2):
            program = build_program(name, options.pp, each, options.microbatches, lookahead)
            if program == seen:
                continue
            seen = program
            found = [*(longer(program, ranks, link) for link in LINKS), longer(program, ranks, 1.0, SPREAD)]
            cells = " | ".join(f"{ordered:.1%} ({ahead:.1%})" for ordered, ahead in found)
            print(f"| {name} | {lookahead} | {cells} |")


if __name__ == "__main__":
    main()
