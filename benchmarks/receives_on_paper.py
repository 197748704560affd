"""What it costs to post receives as NCCL needs it, simulated, as Markdown tables.

Run it with `python -m benchmarks.receives_on_paper`. A message crosses once its receive is posted,
and a rank posts only between two actions. So this is the worst case: on a GPU a receive waits for
the action before only (`pipeline.planned_stage.posting_receives`), and `--held` counts how many
receives hold processors meanwhile.
"""

from __future__ import annotations

import argparse

from benchmarks.surroundings import announce
from raypp.planning.schedules.action import Action, Program, stages_with_backward
from raypp.planning.schedules.catalogue import SCHEDULES, build_program, schedule_named
from raypp.planning.schedules.communication import Receive, sent_by
from raypp.planning.schedules.posting import with_messages
from raypp.planning.schedules.simulate import StageTimes, simulate
from raypp.planning.seating import place_stages

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


def held(program: Program, ranks: list[int], link: float, ahead: int | None = None) -> list[float]:
    """Returns how many receives of each rank wait for their message, as a mean over the step.

    Args:
        program: The actions of every rank.
        ranks: Pipeline rank of every stage.
        link: Time of a message, in forwards; a backward takes two.
        ahead: A receive begins when the host, this many actions ahead of the device, posts it.
            None: as the runtime's do, when the action before its place in the line may begin.
    """
    timeline = simulate(program, StageTimes.equal(len(ranks), link=link))
    sent = {
        message: slot.end + link
        for line in timeline.slots.values()
        for slot in line
        if (message := sent_by(slot.action, ranks, stages_with_backward(program))) is not None
    }
    means = []
    for rank, line in sorted(with_messages(program, ranks, "one_order").items()):
        ends, waited, done = [0.0, *(slot.end for slot in timeline.slots[rank])], 0.0, 0
        free: dict[tuple[int, int], float] = {}
        for item in line:
            if isinstance(item, Action):
                done += 1
            elif isinstance(item, Receive):
                source = ranks[item.message.stage]
                begin = ends[max(0, done - (ahead or 1))]
                waited += max(0.0, sent[item.message] - max(begin, free.get((source, rank), 0.0)))
                free[source, rank] = sent[item.message]
        means.append(waited / timeline.makespan)
    return means


def built(name: str, pp: int, microbatches: int, lookahead: int = 0) -> tuple[Program, list[int]]:
    """Returns a schedule's program on about two stages a rank, and the rank of every stage."""
    kind = schedule_named(name)
    each = kind.nearest_stages(2)
    placement = place_stages(pp, pp * each, kind.placement)
    holder = {stage: rank for rank, stages in enumerate(placement) for stage in stages}
    return build_program(name, pp, each, microbatches, lookahead), [holder[stage] for stage in range(pp * each)]


def print_held(pp: int, microbatches: int) -> None:
    """Prints how many receives hold processors on the rank that has most of them."""
    print("Receives that wait on the worst rank, mean over a step: posted 4 actions ahead → held back\n")
    print(f"| schedule | {' | '.join(f'message {link}' for link in LINKS)} |\n|---|{'---|' * len(LINKS)}")
    for name in SCHEDULES.names():
        program, ranks = built(name, pp, microbatches)
        pairs = [(max(held(program, ranks, link, 4)), max(held(program, ranks, link))) for link in LINKS]
        print(f"| {name} | {' | '.join(f'{before:.2f} → {after:.2f}' for before, after in pairs)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--held", action="store_true")
    parser.add_argument("--pp", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=16)
    options = parser.parse_args()
    announce()
    if options.held:
        print_held(options.pp, options.microbatches)
        return
    print(f"pp {options.pp}, {options.microbatches} microbatches; a step is longer by, in one order (three ahead):\n")
    names = [*(f"message {link}" for link in LINKS), f"message 1.0, stages ±{SPREAD:.0%}"]
    print(f"| schedule | lookahead | {' | '.join(names)} |")
    print("|---|" + "---|" * (len(names) + 1))
    for name in SCHEDULES.names():
        seen: Program | None = None
        for lookahead in (0, 1, 2):
            program, ranks = built(name, options.pp, options.microbatches, lookahead)
            if program == seen:
                continue
            seen = program
            found = [*(longer(program, ranks, link) for link in LINKS), longer(program, ranks, 1.0, SPREAD)]
            cells = " | ".join(f"{ordered:.1%} ({ahead:.1%})" for ordered, ahead in found)
            print(f"| {name} | {lookahead} | {cells} |")


if __name__ == "__main__":
    main()
