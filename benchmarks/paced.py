"""Stages that sleep instead of computing: real ranks, messages and cables, without the cores.

With `--pace SECONDS` a decoder layer's forward sleeps that long and its backward twice as long, and
so does the head, which counts as `HEAD` layers. The programs then wait, send and receive as usual,
but need hardly any core, so what a cable costs shows on a machine with fewer cores than hosts, or
on a busy one. Losses are zero. It does not show what waiting and copying cost the cores.
"""

import time
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raypp.stages.models.stage import DecoderStage

HEAD = 1.2
"""Layers that the head and the loss take as long as."""


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float, shape: tuple[int, ...], *parameters: Tensor) -> Tensor:
        """Returns zeros of a shape."""
        time.sleep(seconds)
        ctx.seconds, ctx.like, ctx.parameters = seconds, x, parameters
        return torch.zeros(shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Returns gradients of zeros, for the input and all parameters."""
        time.sleep(2 * ctx.seconds)
        own = torch.zeros_like(ctx.like) if ctx.like.is_floating_point() else None
        return own, None, None, *(torch.zeros(()).expand_as(parameter) for parameter in ctx.parameters)


def sleep_instead(layer_s: float) -> None:
    """Makes all stages of this process sleep, `layer_s` seconds in a layer's forward."""

    def layer_forward(self: nn.Module, x: Tensor, *_: Any) -> Tensor:
        return _Sleep.apply(x, layer_s, x.shape, *self.parameters())

    def forward(self: DecoderStage, x: Tensor, *_: Any, targets: Any = None, **more: Any) -> Tensor:
        ends = {name: weight for name, weight in self.named_parameters() if ".layers." not in name}
        embedding = [ends.pop(name) for name in list(ends) if "embed_tokens" in name and self.first]
        if self.first:
            x = _Sleep.apply(x, 0.0, (*x.shape[:2], self.options.hidden_size), *embedding)
        for layer in self.model.layers.values():  # called, so that FSDP gathers its weights
            layer.forward = MethodType(layer_forward, layer)
            x = layer(x)
        if self.model.norm is None:
            return x
        shape = () if targets is not None else (*x.shape[:2], self.options.vocab_size)
        return _Sleep.apply(x, layer_s * HEAD, shape, *ends.values())

    DecoderStage.forward = forward  # type: ignore[method-assign]
    F.cross_entropy = lambda logits, labels, **options: logits[0, 0]
