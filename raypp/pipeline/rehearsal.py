"""Runs the first microbatch of a program on every stage at once, without messages.

Legend: B rows of a microbatch, t this rank's share of its tokens, C hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from raypp.pipeline.planned_stage import PlannedStage
from raypp.pipeline.runtime import ProgramRuntime, SendKey
from raypp.pipeline.wire import WireFormat
from raypp.schedules.action import Program


class Rehearsal(ProgramRuntime):
    """Computes what a program does with its first microbatch; random numbers replace messages.

    Its `run` is collective over the ranks of each stage only. It leaves gradients in the stages'
    parameters.

    Args:
        runtime: Runs the program. It may not be in a step.
        program: The program.
    """

    def __init__(self, runtime: ProgramRuntime, program: Program) -> None:
        first = {rank: [action for action in line if action.microbatch == 0] for rank, line in program.items()}
        stages = list(runtime.planned.values())
        super().__init__(stages, first, runtime.rank_of_stage, 1, runtime.loss_fn, runtime.mark)
        self._arrivals = {}
        self._numbers = torch.Generator(stages[0].device).manual_seed(0)

    def _await(self, key: SendKey) -> None:
        """Does nothing: the message is there since its receive."""

    def _message(self, stage: PlannedStage, form: WireFormat, microbatch: int) -> Tensor:
        """Returns an encoded message of random numbers, for a tensor `[B, t, C]`."""
        shape, dtype = stage.shapes[microbatch], stage.boundary_dtype
        return form.encode(torch.randn(shape, generator=self._numbers, dtype=dtype, device=stage.device), seed=0)

    def _receive_forward(self, stage: PlannedStage, microbatch: int) -> None:
        stage.received[microbatch] = self._message(stage, stage.activations, microbatch)

    def _receive_backward(self, stage: PlannedStage, microbatch: int) -> None:
        stage.received_grads[microbatch] = self._message(stage, stage.gradients, microbatch)

    def _send_forward(self, stage: PlannedStage, microbatch: int) -> None:
        """Sends nothing."""

    def _send_backward(self, stage: PlannedStage, microbatch: int) -> None:
        """Sends nothing."""
