"""Finds deadlocks: simulates programs with messages under the strictest rules of each library.

There are three rules for how a library delivers messages. In all of them, a rank runs its line in
order, and an action waits for its message.

- `gloo`: A send returns at once. A message crosses when its receive is posted. For each pair of
  ranks and group, the n-th send matches the n-th receive, even if they are different messages.
- `nccl`: The same, but at each end, all sends and receives between two ranks in one group form one
  queue, and only the heads of both queues can match.
- `blocking`: A send returns only when its receive is posted, or when it is one of the `room`
  messages that the link and its buffers hold (bounded buffers, rendezvous for anything larger).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from raypp.schedules.action import Action
from raypp.schedules.communication import Line, Message, Receive, Send, needed_by

Rule = Literal["gloo", "nccl", "blocking"]
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
    """Describes what hangs or receives the wrong message; empty if every line completes.

    Args:
        lines: The lines of all ranks, from `with_messages`.
        rank_of_stage: Pipeline rank of every stage.
        rule: How messages are delivered.
        room: For `blocking`: messages that a channel accepts before their receives are posted.
        group_of: Which group carries a message.
    """
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
        self.queues: dict[tuple[int, int, str], list[Send | Receive]] = defaultdict(list)
        self.offered: set[Message] = set()
        self.posted: dict[tuple[int, int, str], int] = defaultdict(int)
        self.sent: dict[tuple[int, int, str], int] = defaultdict(int)
        self.arrived: set[Message] = set()
        self.wrong: list[str] = []

    def advance(self, rank: int) -> bool:
        """Runs a rank as far as it can; returns whether it moved."""
        line, begun = self.lines[rank], self.position[rank]
        while self.position[rank] < len(line) and self._can(line[self.position[rank]]):
            self.position[rank] += 1
        return self.position[rank] > begun

    def _can(self, item: Action | Send | Receive) -> bool:
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
        ours, theirs = self.queues[rank, peer, group], self.queues[peer, rank, group]
        while (pair := self._meet(ours, theirs)) is not None:
            ours.remove(pair[0])
            theirs.remove(pair[1])
            if pair[0].message != pair[1].message:
                self.wrong.append(f"ranks {rank} and {peer}: {_name(pair[0])} matches {_name(pair[1])}")
            self.arrived.add(pair[1].message if isinstance(pair[1], Receive) else pair[0].message)

    def _meet(
        self, ours: list[Send | Receive], theirs: list[Send | Receive]
    ) -> tuple[Send | Receive, Send | Receive] | None:
        """Returns the next matching pair of a send and a receive, if any."""
        for mine in ours[:1] if self.rule == "nccl" else ours:
            for other in theirs[:1] if self.rule == "nccl" else theirs:
                if type(mine) is not type(other):
                    return mine, other
        return None
