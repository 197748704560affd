"""Finds deadlocks: simulates programs with messages under the strictest rules of each library.

In all rules, a rank runs its line in order, and an action waits for its message.

- `gloo`: A send returns at once. A message crosses when its receive is posted. For each pair of
  ranks and group, the n-th send matches the n-th receive, even if they are different messages.
- `nccl`: Two ranks have one communicator for each group. Its sends and receives occupy its stream:
  at each end they form one queue, and only the heads of both queues can match. And before any
  action, send or receive, a rank may have to wait until everything it has posted is done: it loads
  a kernel, its allocator is short of memory, it registers host memory, it connects a communicator,
  or two of its streams share a hardware queue. The rule plays the worst case, in which it always
  waits. Lines that complete then complete with fewer waits, too, since each operation is then
  posted earlier and in the same order.
- `queues`: The queues of `nccl`, and no wait for what is posted.
- `blocking`: A send returns only when its receive is posted, or when it is one of the `room`
  messages that the link and its buffers hold (bounded buffers, rendezvous for anything larger).
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Literal

from raypp.planning.schedules.action import Action
from raypp.planning.schedules.communication import Line, Message, Receive, Send, needed_by

Rule = Literal["gloo", "nccl", "queues", "blocking"]
GroupOf = Callable[[Message, int, int], str]
"""(message, sending rank, receiving rank) -> the name of the process group that carries it."""


def by_direction(message: Message, source: int, to: int) -> str:
    """Returns the group that raypp uses: one for messages to higher ranks, one to lower ranks."""
    return "up" if to > source else "down"


def find_hangs(
    lines: Mapping[int, Line],
    rank_of_stage: Sequence[int],
    rule: Rule,
    *,
    room: int = 0,
    group_of: GroupOf = by_direction,
) -> list[str]:
    """Describes what hangs or receives the wrong message; empty if every line completes."""
    play = _Play(lines, rank_of_stage, rule, room, group_of)
    while sum(play.advance(rank) for rank in sorted(lines)):
        pass
    return play.wrong + [
        f"rank {rank} hangs at {_name(line[play.position[rank]])}"
        for rank, line in sorted(lines.items())
        if play.position[rank] < len(line)
    ]


def _name(item: Action | Send | Receive) -> str:
    return str(item) if isinstance(item, Action) else f"{type(item).__name__.lower()} {item.message}"


class _Play:
    """The state of a simulation: the position of every rank and the unmatched messages."""

    def __init__(
        self, lines: Mapping[int, Line], rank_of_stage: Sequence[int], rule: Rule, room: int, group_of: GroupOf
    ) -> None:
        self.lines, self.rank_of, self.rule, self.room, self.group_of = lines, rank_of_stage, rule, room, group_of
        self.position = dict.fromkeys(lines, 0)
        # By (rank, peer, group): sends and receives that have no match yet.
        self.queues: dict[tuple[int, int, str], deque[Send | Receive]] = defaultdict(deque)
        self.pending: Counter[int] = Counter()  # by rank: the same, in all queues
        self.offered: set[Message] = set()
        self.posted: dict[tuple[int, int, str], int] = defaultdict(int)
        self.sent: dict[tuple[int, int, str], int] = defaultdict(int)
        self.arrived: set[Message] = set()
        self.wrong: list[str] = []

    def advance(self, rank: int) -> bool:
        """Runs a rank as far as it can; returns whether it moved."""
        line, begun = self.lines[rank], self.position[rank]
        while self.position[rank] < len(line) and self._can(rank, line[self.position[rank]]):
            self.position[rank] += 1
        return self.position[rank] > begun

    def _can(self, rank: int, item: Action | Send | Receive) -> bool:
        if self.rule == "nccl" and self.pending[rank]:
            return False
        if isinstance(item, Action):
            needed = needed_by(item, self.rank_of)
            return needed is None or needed in self.arrived
        message = item.message
        source, to = self.rank_of[message.stage], self.rank_of[message.to_stage]
        channel = source, to, self.group_of(message, source, to)
        if isinstance(item, Receive):
            self.posted[channel] += 1
            self._offer(to, source, channel[2], item)
            return True
        if message not in self.offered:
            self.offered.add(message)
            self.sent[channel] += 1
            self._offer(source, to, channel[2], item)
        return self.rule != "blocking" or self.sent[channel] <= self.posted[channel] + self.room

    def _offer(self, rank: int, peer: int, group: str, item: Send | Receive) -> None:
        self.queues[rank, peer, group].append(item)
        self.pending[rank] += 1
        ours, theirs = self.queues[rank, peer, group], self.queues[peer, rank, group]
        while (pair := self._meet(ours, theirs)) is not None:
            ours.remove(pair[0])
            theirs.remove(pair[1])
            self.pending.subtract((rank, peer))
            if pair[0].message != pair[1].message:
                self.wrong.append(f"ranks {rank} and {peer}: {_name(pair[0])} matches {_name(pair[1])}")
            self.arrived.add(pair[1].message if isinstance(pair[1], Receive) else pair[0].message)

    def _meet(
        self, ours: deque[Send | Receive], theirs: deque[Send | Receive]
    ) -> tuple[Send | Receive, Send | Receive] | None:
        """Returns the next matching pair of a send and a receive, if any."""
        heads = 1 if self.rule in ("nccl", "queues") else None
        for mine in islice(ours, heads):
            for other in islice(theirs, heads):
                if type(mine) is not type(other):
                    return mine, other
        return None
