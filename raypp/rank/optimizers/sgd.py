"""SGD with momentum and decoupled weight decay."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from raypp.job.job import OptimizerOptions
from raypp.kinds import OptimizerKind
from raypp.rank.optimizers.bf16_weights import Bf16Weights, as_rows
from raypp.rank.optimizers.optimizer import decay_groups
from raypp.stages.parallel.shard import local_part

KIND = OptimizerKind("sgd", "gradient descent with momentum", position=2, states=1, bf16_weights=True)


def build(named: list[tuple[str, nn.Parameter]], options: OptimizerOptions, precision: str) -> Sgd:
    groups = decay_groups(named, options)
    return Sgd(groups, options.lr, options.momentum, Bf16Weights(named))


class Sgd(torch.optim.SGD):
    """SGD with momentum and decoupled weight decay.

    Torch's SGD adds the decay to the gradient instead, so the momentum accumulates it. Here: w <- w
    · (1 - lr · decay), then v <- momentum · v + g, w <- w - lr · v (SGDW, arXiv:1711.05101,
    algorithm 1). `weights`: updates weights that are in bf16; v is then in fp32.
    """

    def __init__(self, groups: list[dict[str, Any]], lr: float, momentum: float, weights: Bf16Weights) -> None:
        super().__init__([{**g, "decay": g["weight_decay"], "weight_decay": 0.0} for g in groups], lr, momentum)
        self.weights = weights

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        if self.weights.any:
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._update(parameter, group)
            return
        for group in self.param_groups:
            if group["decay"]:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        local_part(parameter).mul_(1 - group["lr"] * group["decay"])
        super().step()

    def _update(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        """Updates a weight in bf16."""
        change = self.weights.gradient(parameter)
        if group["momentum"]:
            state = self.state[parameter]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(parameter, dtype=torch.float32)
            change = as_rows(local_part(state["momentum_buffer"])).mul_(group["momentum"]).add_(change)
        values = self.weights.values(parameter).mul_(1 - group["lr"] * group["decay"])
        self.weights.write(parameter, values.sub_(change * group["lr"]))
