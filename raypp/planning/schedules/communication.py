"""The messages of a program: which action sends one, and which action needs it.

A channel is the sequence of all messages from one rank to another. Messages to higher and to lower
ranks use different process groups, so in each group two ranks only send in one direction.
`schedules.posting` decides when receives are posted.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from raypp.planning.schedules.action import Action

MessageKind = Literal["F", "B"]


class Message(NamedTuple):
    """A tensor that one stage sends to a neighbouring stage. `kind`: F: activations to `stage + 1`;
    B: gradients to `stage - 1`."""

    kind: MessageKind
    stage: int
    microbatch: int

    @property
    def to_stage(self) -> int:
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


def sent_by(action: Action, rank_of_stage: Sequence[int], backward: Collection[int]) -> Message | None:
    """Returns the message that an action sends; None if no other rank needs its result. `backward`:
    the stages that have a backward."""
    stage, kind, microbatch = action
    to = stage + 1 if kind == "F" else stage - 1
    if kind == "W" or (kind != "F" and to not in backward) or not _crosses(stage, to, rank_of_stage):
        return None
    return Message("F" if kind == "F" else "B", stage, microbatch)


def needed_by(action: Action, rank_of_stage: Sequence[int]) -> Message | None:
    """Returns the message that an action waits for; None if its input is on the same rank."""
    stage, kind, microbatch = action
    source = stage - 1 if kind == "F" else stage + 1
    if kind == "W" or not _crosses(source, stage, rank_of_stage):
        return None
    return Message("F" if kind == "F" else "B", source, microbatch)


def _crosses(stage: int, to: int, rank_of_stage: Sequence[int]) -> bool:
    both = 0 <= stage < len(rank_of_stage) and 0 <= to < len(rank_of_stage)
    return both and rank_of_stage[stage] != rank_of_stage[to]


def channels_of(rank_of_stage: Sequence[int]) -> list[tuple[int, int]]:
    """Returns all channels (from rank, to rank) of a pipeline, in a safe order to connect them.
    Connecting them one by one in this order cannot hang. Every rank connects its own channels in
    this order. Both ends of the first unconnected channel are always free. The channels of even
    ranks come first, so that pairs of neighbours connect in parallel."""
    channels = set()
    for stage in range(len(rank_of_stage) - 1):
        upper, lower = rank_of_stage[stage], rank_of_stage[stage + 1]
        if upper != lower:
            channels |= {(upper, lower), (lower, upper)}
    return sorted(channels, key=lambda channel: (channel[0] % 2, channel))
