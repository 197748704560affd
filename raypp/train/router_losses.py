"""The values of the router's losses, for models with experts: what a step reports of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from raypp.parallel.expert import moe_blocks
from raypp.spec.models import DecoderOptions, MoeOptions


class RouterLosses:
    """Adds the router's losses of this rank's layers up to those of the model.

    Every layer has its own place in the sum over the world, as every parameter has in that of the gradient norm: so a
    pipeline of any cut gives the bits of one process.

    Args:
        stages: This rank's stages.
        options: The `model:` section; without experts there is nothing to report.
    """

    def __init__(self, stages: Sequence[nn.Module], options: DecoderOptions) -> None:
        self._layers = options.num_layers if isinstance(options, MoeOptions) else 0
        self._blocks = [
            (int(index), block)
            for stage in (stages if self._layers else ())
            for index, layer in stage.get_submodule("model.layers").named_children()
            for block in moe_blocks(layer)
        ]

    def take(self) -> Tensor:
        """This rank's part of the step's sums, fp64 `[2 · layers]`, 0 for others' layers; empty without experts."""
        sums = torch.zeros(self._layers, 2, dtype=torch.float64)
        for index, block in self._blocks:
            sums[index] = block.router_sums.take()
        return sums.flatten()

    def report(self, sums: Tensor, tokens: int) -> dict[str, float]:
        """The step's losses, unweighted: means over tokens with a label and over layers.

        Args:
            sums: What `take` gave, added up over the world.
            tokens: Global count of tokens with a label.
        """
        if not self._layers:
            return {}
        aux, z = (float(part) / max(tokens, 1) / self._layers for part in sums.view(-1, 2).sum(0))
        return {"aux_loss": aux, "z_loss": z}
