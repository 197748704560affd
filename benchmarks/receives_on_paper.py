"""What receives cost that are posted in one order, as NCCL needs it, simulated. Computed.

pp 4, 16 microbatches, about two stages a rank. The first table is the worst case: a rank posts
between two actions only, and a message crosses once its receive is posted. The second counts
receives that hold processors while they wait.
"""

from benchmarks.surroundings import begin
from benchmarks.tables import head
from raypp.planning.schedules.action import Action, Program, stages_with_backward
from raypp.planning.schedules.catalogue import SCHEDULES, build_program, schedule_named
from raypp.planning.schedules.communication import Receive, sent_by
from raypp.planning.schedules.posting import with_messages
from raypp.planning.schedules.simulate import StageTimes, simulate
from raypp.planning.seating import place_stages

PP, MICROBATCHES, LINKS = 4, 16, (0.25, 0.5, 1.0, 2.0)
"""`LINKS`: times of a message, in forwards; a backward takes two."""


def longer(program: Program, ranks: list[int], link: float) -> float:
    """Returns by what fraction a step is longer than if all receives were posted at its start."""
    times = StageTimes.equal(len(ranks), link=link)
    in_order = simulate(program, times, with_messages(program, ranks, "one_order"))
    return in_order.makespan / simulate(program, times).makespan - 1


def held(program: Program, ranks: list[int], link: float, ahead: int | None = None) -> list[float]:
    """Returns how many receives of each rank wait for their message, as a mean over the step. A
    message takes `link` forwards. A receive begins when the host, `ahead` actions ahead of the
    device, posts it. None: as the runtime's do, when the action before its place in the line may
    begin."""
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


def built(name: str, lookahead: int) -> tuple[Program, list[int]]:
    """Returns a schedule's program, and the rank of every stage."""
    kind = schedule_named(name)
    each = kind.nearest_stages(2)
    placement = place_stages(PP, PP * each, kind.placement)
    holder = {stage: rank for rank, stages in enumerate(placement) for stage in stages}
    return build_program(name, PP, each, MICROBATCHES, lookahead), [holder[stage] for stage in range(PP * each)]


def main() -> None:
    begin(__doc__)
    titles = " | ".join(f"message {link}" for link in LINKS)
    print("\nA step is longer by:", head(f"schedule | lookahead | {titles}"), sep="\n")
    for name in SCHEDULES.names():
        for lookahead in (0, 1, 2):
            built_one = built(name, lookahead)
            print(f"| {name} | {lookahead} | {' | '.join(f'{longer(*built_one, link):.1%}' for link in LINKS)} |")
    print("\nReceives that wait on the fullest rank, mean of a step: held back (posted 4 actions ahead):")
    print(head(f"schedule | {titles}"))
    for name in SCHEDULES.names():
        pairs = [[max(held(*built(name, 0), link, ahead)) for ahead in (None, 4)] for link in LINKS]
        print(f"| {name} | {' | '.join(f'{after:.2f} ({before:.2f})' for after, before in pairs)} |")


if __name__ == "__main__":
    main()
