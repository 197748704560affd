"""Prepares a device for the first step: loads kernels and connects communicators.

On CUDA the first use of a kernel loads it, and the first use of a communicator connects its ranks;
both may wait for the whole device. In the first step every stage would do this in turn, while the
others wait for its first message. Here all stages do it at the same time. A step cannot hang either
way (`schedules.posting`).

The numbers of the run do not change: a rehearsal computes with the weights and leaves them as they
are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from raypp.parallel.context import ContextShare, RingShare
from raypp.parallel.expert import moe_blocks
from raypp.pipeline.collate import StageBatch
from raypp.pipeline.planned_stage import PlannedStage
from raypp.pipeline.runtime import ProgramRuntime
from raypp.pipeline.wire import WireFormat
from raypp.schedules.action import Program
from raypp.schedules.communication import Message, MessageKind
from raypp.spec.models import DecoderOptions, MoeOptions
from raypp.train.build import BuiltStages


def warm_up(
    built: BuiltStages, program: Program, batch: StageBatch, share: ContextShare, router_losses: RouterLosses
) -> None:
    """Runs one microbatch through each of this rank's stages and connects all communicators.

    Collective over the world. Call it between two steps, while no parameter has a gradient. It
    changes no weight, no optimizer state and no random number that is drawn later.

    The pipeline's channels are not used: they were connected when the stages were built.

    Args:
        batch: A microbatch of the next step, `[B, t]`: the kernels depend on its shape.
        router_losses: The sums that the stages' routers add to.
    """
    rows, length = batch.tokens_BT.shape
    device = batch.tokens_BT.device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        rehearsal = Rehearsal(built.runtime, program)
        rehearsal.run(rows, [length], [batch.tokens_BT], [batch.stage_arguments()], [batch.labels_BT])
        if isinstance(share, RingShare):
            # How far messages travel around the ring depends on the lengths of documents.
            for distance in range(1, share.size):
                _, works = share.ring.exchange(torch.zeros(1, device=device), distance)
                for work in works:
                    work.wait()
        if built.tied is not None:
            built.tied.sum_gradients()  # also empties its accumulated gradients
    router_losses.take()
    for module in built.modules:
        module.zero_grad(set_to_none=True)


class Rehearsal(ProgramRuntime):
    """Computes what a program does with its first microbatch; random numbers replace messages.

    Its `run` is collective over the ranks of each stage only. It leaves gradients in the stages'
    parameters.

    Args:
        runtime: Runs the program. It may not be in a step.
    """

    def __init__(self, runtime: ProgramRuntime, program: Program) -> None:
        first = {rank: [action for action in line if action.microbatch == 0] for rank, line in program.items()}
        stages = list(runtime.planned.values())
        super().__init__(stages, first, runtime.rank_of_stage, 1, runtime.loss_fn, runtime.mark)
        self._arrivals = {}
        self._numbers = torch.Generator(stages[0].device).manual_seed(0)

    def _await(self, message: Message) -> None:
        """Does nothing: the message is there since its receive."""

    def _message(self, stage: PlannedStage, form: WireFormat, microbatch: int) -> Tensor:
        """Returns an encoded message of random numbers, for a tensor `[B, t, C]`."""
        shape, dtype = stage.shapes[microbatch], stage.boundary_dtype
        return form.encode(torch.randn(shape, generator=self._numbers, dtype=dtype, device=stage.device), seed=0)

    def _receive(self, kind: MessageKind, stage: PlannedStage, microbatch: int) -> None:
        received, form = (stage.received, stage.activations) if kind == "F" else (stage.received_grads, stage.gradients)
        received[microbatch] = self._message(stage, form, microbatch)

    def _send(self, kind: MessageKind, stage: PlannedStage, microbatch: int) -> None:
        """Sends nothing."""


class RouterLosses:
    """Sums the router losses of this rank's layers.

    Every layer has its own place in the sum over the world, as every parameter has in the sum for
    the gradient norm. So a pipeline of any cut gives the bits of a single process.

    Args:
        options: The `model:` section; without experts there is nothing to report.
    """

    def __init__(self, stages: Sequence[nn.Module], options: DecoderOptions, device: torch.device) -> None:
        self._device = device
        self._layers = options.num_layers if isinstance(options, MoeOptions) else 0
        self._with_experts = options.expert_layers if isinstance(options, MoeOptions) else 0
        self._blocks = [
            (int(index), block)
            for stage in (stages if self._layers else ())
            for index, layer in stage.get_submodule("model.layers").named_children()
            for block in moe_blocks(layer)
        ]

    def take(self) -> Tensor:
        """Takes this rank's sums of the step and resets them.

        Returns:
            `[2 · L]`, fp64, on the device; 0 for layers on other ranks. `[0]` without experts.
        """
        none_2 = torch.zeros(2, dtype=torch.float64, device=self._device)
        if not self._layers:
            return none_2[:0]
        taken = {index: block.router_sums.take() for index, block in self._blocks}
        # One kernel for all layers, not one for each.
        rows = [none_2 if (sums_2 := taken.get(index)) is None else sums_2 for index in range(self._layers)]
        return torch.cat(rows)

    def report(self, sums: Tensor, tokens: int) -> dict[str, float]:
        """Returns the step's unweighted losses: means over layers with experts and labelled tokens.

        Args:
            sums: `[2 · L]`, fp64: the results of `take`, summed over the world.
            tokens: Global number of tokens with a label.
        """
        if not self._with_experts:
            return {}
        aux, z = (float(part) / max(tokens, 1) / self._with_experts for part in sums.view(-1, 2).sum(0))
        return {"aux_loss": aux, "z_loss": z}
