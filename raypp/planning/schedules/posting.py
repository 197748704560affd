"""Adds messages to a program: what is sent after which action, and when receives are posted.

A send directly follows its action. On each channel the receiver posts in the order of the sends.
Two ways to post receives:

- `ahead`, for gloo: `RECEIVES_AHEAD` messages before their use. gloo starts to send only when the
  receive is posted, and posted receives hold up nothing else.
- `one_order`, for NCCL, where a rank may at any time have to wait for everything it has posted.

**One order.** Take one order of all actions of all ranks in which every action follows those before
it on its rank and the one whose message it needs. Extend it to a sequence of events: each action is
followed at once by the transfer of its message, if it has one. The line of a rank is what it does
in this sequence: its actions, and its end of each transfer. So a receive is posted directly before
the first action of its rank that comes after the sending action in the order.

*Such lines complete, whatever waits are added.* Suppose that before every action, send and receive
a rank waits until all it has posted is done. By induction along the sequence, each event happens:
all that its ranks have in their lines before it are events before it in the sequence, so they are
done. The waits are over, the input of an action has arrived, and the two ends of a transfer find
each other. Fewer waits only let an item begin earlier, and the same induction holds. This covers
lazy loading of kernels, the allocator's retry, registration of host memory, streams that share a
hardware queue, a communicator that is connected at its first message, and several channels that
share one communicator. Collectives of FSDP, context and expert parallelism, at the same place in
the lines of all their ranks, are events of the sequence, too. So does the wait of a GPU's receives
(`pipeline.planned_stage.posting_receives`): each begins once its rank has done all actions before
the one that it follows in the line. Until then it would only hold processors.

*There are no others.* If lines complete with all these waits, take the order in which actions ran
and transfers ended. A rank does nothing between an action and the end of its message, so the action
can be moved directly before it, and the order is such a sequence. So no receive can safely be
posted earlier, except by another order.

The order used is that in which the actions would end on stages of equal speed. Then every receive
is posted no later than its message is sent, if the stages keep that pace. Of a few message times in
`_PACES`, the one whose order costs least in simulation is used.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Literal

from raypp.planning.schedules.action import Action, Program, stages_with_backward
from raypp.planning.schedules.communication import Line, Message, Receive, Send, needed_by, sent_by
from raypp.planning.schedules.simulate import Simulator, StageTimes

Posting = Literal["ahead", "one_order"]

RECEIVES_AHEAD = 3
"""Receives that a rank keeps posted per channel: one for the message on the link, two queued."""

_PACES = (0.5, 1.5)
"""Message times, in forwards, whose orders are compared. Multiples of 1/4 add up exactly, so every
rank finds the same order."""
_LINKS = {0.5: 2, 1.0: 2, 2.0: 1}
"""Message times, in forwards, at which orders are compared, and the weight of each. A program with
a lookahead is made for slow links: the best order for fast ones costs it up to a fifth there."""


def posting_on(device_type: str) -> Posting:
    """Returns how a run's ranks post receives. `device_type`: cuda (NCCL) or cpu (gloo)."""
    return "ahead" if device_type == "cpu" else "one_order"


def with_messages(program: Program, rank_of_stage: Sequence[int], posting: Posting) -> dict[int, Line]:
    """Returns every rank's actions with their sends and receives, the same on every rank."""
    if posting == "ahead":
        return _ahead(program, rank_of_stage, RECEIVES_AHEAD)
    paced = Simulator(program)
    orders = [_in_one_order(paced, rank_of_stage, link) for link in _PACES]
    if all(lines == orders[0] for lines in orders):
        return orders[0]

    equal = {link: StageTimes.equal(len(rank_of_stage), link=link) for link in _LINKS}
    free = {link: paced.run(times).makespan for link, times in equal.items()}

    def cost(lines: dict[int, Line]) -> float:
        longer = {link: paced.run(times, lines).makespan / free[link] for link, times in equal.items()}
        return sum(weight * longer[link] for link, weight in _LINKS.items())

    return min(orders, key=cost)


def _in_one_order(paced: Simulator, rank_of_stage: Sequence[int], link: float) -> dict[int, Line]:
    """Returns the lines for the order in which actions end if a message takes `link` forwards."""
    program, slots = paced.program, paced.run(StageTimes.equal(len(rank_of_stage), link=link)).slots
    # No two actions of which one depends on the other end at the same time.
    order = sorted((slot.end, rank, index) for rank, line in slots.items() for index, slot in enumerate(line))
    lines: dict[int, Line] = {rank: [] for rank in program}
    backward = stages_with_backward(program)
    for _, rank, index in order:
        action = program[rank][index]
        lines[rank].append(action)
        if (message := sent_by(action, rank_of_stage, backward)) is not None:
            lines[rank].append(Send(message))
            lines[rank_of_stage[message.to_stage]].append(Receive(message))
    return lines


def _ahead(program: Program, rank_of_stage: Sequence[int], ahead: int) -> dict[int, Line]:
    """Returns lines that post receives early. On each channel, up to `ahead` receives are posted
    and not used yet, or more if the next action needs a later message."""
    channels: dict[tuple[int, int], list[Message]] = defaultdict(list)
    backward = stages_with_backward(program)
    for rank, actions in program.items():
        for action in actions:
            if (message := sent_by(action, rank_of_stage, backward)) is not None:
                channels[rank, rank_of_stage[message.to_stage]].append(message)
    incoming = {rank: {source: sent for (source, to), sent in channels.items() if to == rank} for rank in program}
    return {rank: _line(actions, incoming[rank], rank_of_stage, backward, ahead) for rank, actions in program.items()}


def _line(
    actions: Sequence[Action],
    incoming: Mapping[int, Sequence[Message]],
    rank_of_stage: Sequence[int],
    backward: Collection[int],
    ahead: int,
) -> Line:
    line: Line = []
    posted: set[Message] = set()
    waiting = {source: iter(messages) for source, messages in incoming.items()}
    unused = dict.fromkeys(incoming, 0)

    def post(source: int, count: int) -> None:
        while unused[source] < count and (message := next(waiting[source], None)) is not None:
            line.append(Receive(message))
            posted.add(message)
            unused[source] += 1

    for source in sorted(incoming):
        post(source, ahead)
    for action in actions:
        needed = needed_by(action, rank_of_stage)
        if needed is not None:
            source = rank_of_stage[needed.stage]
            while needed not in posted:
                post(source, unused[source] + 1)
        line.append(action)
        if (message := sent_by(action, rank_of_stage, backward)) is not None:
            line.append(Send(message))
        if needed is not None:
            unused[source] -= 1
            post(source, ahead)
    return line
