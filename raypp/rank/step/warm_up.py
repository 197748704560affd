"""Prepares a device for the first step: loads kernels and connects communicators.

Both may wait for the whole device. In the first step every stage would do this in turn, while the
others wait for its message; here all do it at once. A rehearsal leaves the weights as they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from raypp.job.models import DecoderOptions, with_experts
from raypp.planning.schedules.action import Program
from raypp.planning.schedules.communication import Message, MessageKind
from raypp.rank.build import BuiltStages
from raypp.rank.step.collate import StageBatch
from raypp.stages.models.moe import bias_rate
from raypp.stages.parallel.context import ContextShare, RingShare
from raypp.stages.parallel.expert import moe_blocks
from raypp.stages.pipeline.planned_stage import PlannedStage
from raypp.stages.pipeline.runtime import ProgramRuntime
from raypp.stages.pipeline.wire import WireFormat


def warm_up(
    built: BuiltStages,
    program: Program,
    batch: StageBatch,
    share: ContextShare,
    router_losses: RouterLosses,
    parts: int = 1,
) -> None:
    """Runs one microbatch through each of this rank's stages and connects all communicators.

    Collective over the world. Call it between two steps, while no parameter has a gradient. It
    changes no weight, no optimizer state and no random number that is drawn later.

    The pipeline's channels are not used: they were connected when the stages were built. `batch`: a
    microbatch of the next step, `[B, t]`: the kernels depend on its shape. `router_losses`: the
    sums that the stages' routers add to. `parts`: mesh.tp.
    """
    rows, length = batch.tokens_BT.shape[0], batch.tokens_BT.shape[1] // parts
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
    """Computes what a program does with its first microbatch; random numbers replace messages. Its
    `run` is collective over the ranks of each stage only. It leaves gradients in the stages'
    parameters. `runtime`: runs the program. It may not be in a step."""

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
    """Sums the router losses of this rank's layers, and moves the routers' correction biases. Every
    layer has its own place in the sum over the world, as every parameter has in the sum for the
    gradient norm. So a pipeline of any cut gives the bits of a single process. `options`: the
    `model:` section; without experts there is nothing to report."""

    def __init__(self, stages: Sequence[nn.Module], options: DecoderOptions, device: torch.device) -> None:
        self._device, self._rate = device, bias_rate(options)
        routed = with_experts(options)
        self._width = 2 + (routed.num_experts if self._rate and routed is not None else 0)
        self._layers = options.num_layers if routed is not None else 0
        self._with_experts = routed.expert_layers if routed is not None else 0
        self._blocks = [
            (int(index), block)
            for stage in (stages if self._layers else ())
            for index, layer in stage.get_submodule("model.layers").named_children()
            for block in moe_blocks(layer)
        ]

    def scale(self, factor: float) -> None:
        """Scales the gradients of the losses, as those of the main loss are."""
        for _, block in self._blocks:
            block.router_sums.loss_scale = factor

    def take(self) -> Tensor:
        """Takes this rank's sums of the step and resets them. Returns `[N · L]`, fp64, on the
        device; 0 for layers on other ranks. `[0]` without experts. N is 2, or 2 + E where the
        choices of each of E experts are counted for the biases."""
        none = torch.zeros(self._width, dtype=torch.float64, device=self._device)
        if not self._layers:
            return none[:0]
        taken = {index: block.router_sums.take() for index, block in self._blocks}
        # One kernel for all layers, not one for each.
        rows = [none if (sums := taken.get(index)) is None else sums for index in range(self._layers)]
        return torch.cat(rows)

    def report(self, sums: Tensor, tokens: int) -> dict[str, float]:
        """Returns the step's unweighted losses: means over layers with experts and labelled tokens.
        `sums`: `[N · L]`, fp64: the results of `take`, summed over the world."""
        if not self._with_experts:
            return {}
        both_2 = sums.view(-1, self._width)[:, :2].sum(0)
        aux, z = (float(part) / max(tokens, 1) / self._with_experts for part in both_2)
        return {"aux_loss": aux, "z_loss": z}

    def correct(self, sums: Tensor) -> None:
        """Moves the correction biases by the loads of a step: + rate · sign(mean load − load).
        Every rank that holds a layer does the same (arXiv:2412.19437, section 2.1.2)."""
        if not self._rate:
            return
        loads_LE = sums.view(-1, self._width)[:, 2:]
        moves_LE = self._rate * (loads_LE.mean(1, keepdim=True) - loads_LE).sign()
        for index, block in self._blocks:
            if (bias := block.correction) is not None:
                bias.add_(moves_LE[index].view_as(bias).to(bias))
