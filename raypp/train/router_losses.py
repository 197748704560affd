"""The router losses that a step reports, for models with experts.

Legend: L layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from raypp.parallel.expert import moe_blocks
from raypp.spec.models import DecoderOptions, MoeOptions


class RouterLosses:
    """Sums the router losses of this rank's layers.

    Every layer has its own place in the sum over the world, as every parameter has in the sum for
    the gradient norm. So a pipeline of any cut gives the bits of a single process.

    Args:
        stages: This rank's stages.
        options: The `model:` section; without experts there is nothing to report.
        device: The device that holds the stages.
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
