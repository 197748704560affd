"""When the sums of gradients over replicas begin on a rank: a decision about its cable.

Sums leave a host through the same cable as the pipeline's messages. A stage's last gradients have a
stage below that waits for them; its sums have time until the end of the step. So a rank that still
sends starts no sum over replicas. The sums of a stage after which the rank sends nothing begin
within its last backward, block by block.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from raypp.torch_private import Computation, LoweredAction

_SENDS = frozenset({Computation.SEND_F, Computation.SEND_B})
_COMPUTES = frozenset(
    {Computation.FORWARD, Computation.FULL_BACKWARD, Computation.BACKWARD_INPUT, Computation.BACKWARD_WEIGHT}
)


@dataclass(frozen=True)
class SumStart:
    """When a rank's sums begin.

    Attributes:
        held: Stages whose sums wait for the rank's last message.
        last_send: Position of the action that sends it; -1 if the rank sends nothing.
        waits: Whether that message must have left before the held sums begin. Not if the rank
            still computes then: it does not stand still for its cable.
    """

    held: frozenset[int]
    last_send: int
    waits: bool


def sum_start(actions: Sequence[LoweredAction], stages: Collection[int]) -> SumStart:
    """Decides when the sums of a rank's stages begin.

    Args:
        actions: The rank's actions in a step.
        stages: Those of its stages that have sums over replicas.
    """
    last_send = last_compute = -1
    ends: dict[int, int] = {}
    for position, action in enumerate(actions):
        if action.computation_type in _SENDS:
            last_send = position
        elif action.computation_type in _COMPUTES:
            last_compute = ends[action.stage_index] = position
    held = frozenset(stage for stage in stages if ends.get(stage, -1) < last_send)
    return SumStart(held, last_send, waits=last_compute < last_send)
