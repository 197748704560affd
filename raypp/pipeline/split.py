"""A backward in two halves, as schedules without bubbles do it: first for the input, later for the weights."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from raypp.torch_private import stage_backward_input, stage_backward_weight


def backward_for_input(module: nn.Module, output: Tensor, gradient: Tensor, given: Tensor) -> Callable[[], None]:
    """Does the half for the input: its gradient is then in `given.grad`.

    Args:
        module: What made the output.
        output: `module(given)`; its graph is used up by both halves together.
        gradient: Of the output.
        given: The input; it requires a gradient.

    Returns:
        The half for the weights: adds to the gradients of the module's parameters. Call it once.
    """
    _, groups = stage_backward_input([output], [gradient], [given], module.parameters())

    def for_weights() -> None:
        stage_backward_weight(module.parameters(), groups)

    return for_weights
