"""Splits a backward in two, as zero-bubble schedules need: first the input, later the weights.

Legend: B rows, T tokens, C hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from raypp.torch_private import stage_backward_input, stage_backward_weight


def backward_for_input(module: nn.Module, output: Tensor, gradient: Tensor, given: Tensor) -> Callable[[], None]:
    """Computes the input's gradient and stores it in `given.grad`.

    Args:
        module: The module that computed the output.
        output: `module(given)`, `[B, T, C]` or `[B, T, V]`; the two halves consume its graph.
        gradient: The gradient of the output, of its shape.
        given: The input, `[B, T, C]`; requires a gradient.

    Returns:
        The other half: adds to the gradients of the module's parameters. Call it once.
    """
    _, groups = stage_backward_input([output], [gradient], [given], module.parameters())

    def for_weights() -> None:
        """Accumulates the gradients of the parameters, each of its parameter's shape."""
        stage_backward_weight(module.parameters(), groups)

    return for_weights
