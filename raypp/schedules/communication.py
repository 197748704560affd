"""A program with its messages: what is sent after which action, and when receives are posted.

A channel is everything one rank sends to another, in the order in which it is sent; the receiver posts its receives in
that order. Messages to higher ranks and messages to lower ranks use different process groups, so that in each group
two ranks only ever talk one way: neither gloo (which matches in order) nor NCCL (which runs what a group does between
two ranks one after another) can then hold a message up behind one that waits for it.

Receives are posted `RECEIVES_AHEAD` messages ahead of their use. gloo begins to send only when the receive is posted: a
receive posted one forward before its use would cost every message longer than a forward.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from raypp.schedules.action import Action, Program

RECEIVES_AHEAD = 3
"""Buffers a rank keeps posted on each channel. A link carries one message at a time; two more are behind it."""


@dataclass(frozen=True, slots=True)
class Message:
    """What crosses from one stage to the next.

    Attributes:
        kind: F activations to `stage + 1`, B gradients to `stage - 1`.
        stage: The sending stage.
        microbatch: Index of the microbatch.
    """

    kind: Literal["F", "B"]
    stage: int
    microbatch: int

    @property
    def to_stage(self) -> int:
        return self.stage + (1 if self.kind == "F" else -1)

    def __str__(self) -> str:
        return f"{self.stage}→{self.to_stage} {self.kind}{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Send:
    """The message leaves; never waited for here."""

    message: Message


@dataclass(frozen=True, slots=True)
class Receive:
    """A buffer for the message is offered; it is waited for by the action that needs it."""

    message: Message


Line = list[Action | Send | Receive]
"""What one rank does, in order."""


def sent_by(action: Action, rank_of_stage: Sequence[int]) -> Message | None:
    """The message that an action makes; None when nobody on another rank waits for its result."""
    if action.kind == "W":
        return None
    message = Message("F" if action.kind == "F" else "B", action.stage, action.microbatch)
    return message if _crosses(message, rank_of_stage) else None


def needed_by(action: Action, rank_of_stage: Sequence[int]) -> Message | None:
    """The message that an action waits for; None when its input is on its own rank."""
    if action.kind == "W":
        return None
    forward = action.kind == "F"
    message = Message("F" if forward else "B", action.stage + (-1 if forward else 1), action.microbatch)
    return message if 0 <= message.stage < len(rank_of_stage) and _crosses(message, rank_of_stage) else None


def _crosses(message: Message, rank_of_stage: Sequence[int]) -> bool:
    to = message.to_stage
    return 0 <= to < len(rank_of_stage) and rank_of_stage[to] != rank_of_stage[message.stage]


def with_messages(program: Program, rank_of_stage: Sequence[int], ahead: int = RECEIVES_AHEAD) -> dict[int, Line]:
    """Every rank's actions with their sends and receives: deterministic, the same wherever it is worked out.

    A send follows its action at once. On each channel up to `ahead` receives are posted and not yet used; one more when
    the next action needs a later message than these.
    """
    channels: dict[tuple[int, int], list[Message]] = defaultdict(list)
    for rank, actions in program.items():
        for action in actions:
            if (message := sent_by(action, rank_of_stage)) is not None:
                channels[rank, rank_of_stage[message.to_stage]].append(message)
    return {
        rank: _line(
            actions, {source: sent for (source, to), sent in channels.items() if to == rank}, rank_of_stage, ahead
        )
        for rank, actions in program.items()
    }


def _line(
    actions: Sequence[Action], incoming: Mapping[int, Sequence[Message]], rank_of_stage: Sequence[int], ahead: int
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
        if (message := sent_by(action, rank_of_stage)) is not None:
            line.append(Send(message))
        if needed is not None:
            unused[source] -= 1
            post(source, ahead)
    return line


def channels_of(rank_of_stage: Sequence[int]) -> list[tuple[int, int]]:
    """All (from rank, to rank) of a pipeline, in an order in which connecting them one by one cannot hang.

    Every rank connects its own in this order. Of the channels not yet connected the first has both its ends free; those
    of even ranks come first, so that neighbours connect side by side.
    """
    found = set()
    for stage in range(len(rank_of_stage) - 1):
        upper, lower = rank_of_stage[stage], rank_of_stage[stage + 1]
        if upper != lower:
            found |= {(upper, lower), (lower, upper)}
    return sorted(found, key=lambda channel: (channel[0] % 2, channel))
