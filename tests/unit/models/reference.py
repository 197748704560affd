"""Builds a whole model of a family, and runs it."""

from typing import Any

import torch

from raypp.job.models import DecoderOptions
from raypp.stages.models.documents import PackedDocuments
from raypp.stages.models.initial_values import initial_value
from raypp.stages.models.stage import build_stage


def whole_model(options: DecoderOptions, seed: int = 7) -> torch.nn.Module:
    """Builds the whole model as one stage; its weights let each part affect the logits visibly."""
    model = build_stage(options, range(options.num_layers), first=True, last=True).to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            value = initial_value(name, parameter.shape, options, seed)
            if parameter.ndim > 1:
                value *= 5
            else:  # gains and biases that are not all alike
                value += 0.1 * torch.randn(value.shape, generator=torch.Generator().manual_seed(len(name)))
            parameter.copy_(value)
    return model


def run(model: torch.nn.Module, tokens: torch.Tensor, documents: list[int], **other: Any) -> torch.Tensor:
    positions = torch.cat([torch.arange(n) for n in documents])[None].expand_as(tokens)
    packed = PackedDocuments.of_rows([documents] * len(tokens), tokens.shape[1])
    return model(tokens, positions, packed, **other)
