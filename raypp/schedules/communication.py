"""Adds messages to a program: what is sent after which action, and when receives are posted.

A channel is the sequence of all messages from one rank to another. The receiver posts its receives
in the order of the sends. Messages to higher and to lower ranks use different process groups, so in
each group two ranks only send in one direction. gloo matches messages in order, and NCCL runs the
operations of a group between two ranks one after another. With one direction per group, neither can
block a message behind another one that depends on it.

Receives are posted `RECEIVES_AHEAD` messages before they are used. gloo starts to send only when
the receive is posted. A receive posted one forward before its use would delay every message that
takes longer than a forward.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from raypp.schedules.action import Action, Program

RECEIVES_AHEAD = 3
"""Receives that a rank keeps posted per channel: one for the message on the link, two queued."""


@dataclass(frozen=True, slots=True)
class Message:
    """A tensor that one stage sends to a neighbouring stage.

    Attributes:
        kind: F: activations to `stage + 1`; B: gradients to `stage - 1`.
        stage: The sending stage.
        microbatch: Index of the microbatch.
    """

    kind: Literal["F", "B"]
    stage: int
    microbatch: int

    @property
    def to_stage(self) -> int:
        """The receiving stage."""
        return self.stage + (1 if self.kind == "F" else -1)

    def __str__(self) -> str:
        return f"{self.stage}→{self.to_stage} {self.kind}{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Send:
    """Starts sending a message. The program never waits for it."""

    message: Message


@dataclass(frozen=True, slots=True)
class Receive:
    """Posts the receive of a message. The action that needs the message waits for it."""

    message: Message


Line = list[Action | Send | Receive]
"""The actions, sends and receives of one rank, in order."""


def sent_by(action: Action, rank_of_stage: Sequence[int]) -> Message | None:
    """Returns the message that an action sends; None if no other rank needs its result."""
    if action.kind == "W":
        return None
    message = Message("F" if action.kind == "F" else "B", action.stage, action.microbatch)
    return message if _crosses(message, rank_of_stage) else None


def needed_by(action: Action, rank_of_stage: Sequence[int]) -> Message | None:
    """Returns the message that an action waits for; None if its input is on the same rank."""
    if action.kind == "W":
        return None
    forward = action.kind == "F"
    message = Message("F" if forward else "B", action.stage + (-1 if forward else 1), action.microbatch)
    return message if 0 <= message.stage < len(rank_of_stage) and _crosses(message, rank_of_stage) else None


def _crosses(message: Message, rank_of_stage: Sequence[int]) -> bool:
    to = message.to_stage
    return 0 <= to < len(rank_of_stage) and rank_of_stage[to] != rank_of_stage[message.stage]


def with_messages(program: Program, rank_of_stage: Sequence[int], ahead: int = RECEIVES_AHEAD) -> dict[int, Line]:
    """Returns the actions of every rank with their sends and receives.

    The result is deterministic: every rank computes the same. A send directly follows its action.
    On each channel, up to `ahead` receives are posted and not used yet, or more if the next action
    needs a later message.
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
    """Returns all channels (from rank, to rank) of a pipeline, in a safe order to connect them.

    Connecting them one by one in this order cannot hang. Every rank connects its own channels in
    this order. Both ends of the first unconnected channel are always free. The channels of even
    ranks come first, so that pairs of neighbours connect in parallel.
    """
    found = set()
    for stage in range(len(rank_of_stage) - 1):
        upper, lower = rank_of_stage[stage], rank_of_stage[stage + 1]
        if upper != lower:
            found |= {(upper, lower), (lower, upper)}
    return sorted(found, key=lambda channel: (channel[0] % 2, channel))
