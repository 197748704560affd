"""Prepares a device for the first step: loads kernels and connects communicators.

On CUDA the first use of a kernel loads it, and the first use of a communicator connects its ranks;
both may wait for the whole device. In the first step every stage would do this in turn, while the
others wait for its first message. Here all stages do it at the same time. A step cannot hang either
way (`schedules.posting`).

The numbers of the run do not change: a rehearsal computes with the weights and leaves them as they
are.
"""

from __future__ import annotations

import torch

from raypp.parallel.context import ContextShare, RingShare
from raypp.parallel.wide_gradients import fill_wide_gradients
from raypp.pipeline.collate import StageBatch
from raypp.pipeline.rehearsal import Rehearsal
from raypp.schedules.action import Program
from raypp.train.build import BuiltStages
from raypp.train.router_losses import RouterLosses


def warm_up(
    built: BuiltStages, program: Program, batch: StageBatch, share: ContextShare, router_losses: RouterLosses
) -> None:
    """Runs one microbatch through each of this rank's stages and connects all communicators.

    Collective over the world. Call it between two steps, while no parameter has a gradient. It
    changes no weight, no optimizer state and no random number that is drawn later.

    The pipeline's channels are not used: `connect` has connected them when the stages were built.

    Args:
        built: This rank's stages.
        program: The program of the next step.
        batch: A microbatch of the next step, `[B, t]`: the kernels depend on its shape.
        share: This rank's share of every row.
        router_losses: The sums that the stages' routers add to.
    """
    rows, length = batch.tokens_BT.shape
    device = batch.tokens_BT.device
    fill_wide_gradients(built.modules)
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
