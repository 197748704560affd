"""Builds a family's model and the one of Hugging Face transformers with the same weights."""

from __future__ import annotations

import re
from typing import Any

import torch
import torch.nn.functional as F

from raypp.models.documents import PackedDocuments
from raypp.models.initial_values import initial_value
from raypp.models.stage import build_stage
from raypp.spec.models import DecoderOptions

STACKED = re.compile(r"(.*\.experts)\.(\w+)")


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


def their_names(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Stacked experts one by one: `experts.gate_proj[3]` is their `experts.3.gate_proj.weight`."""
    named: dict[str, torch.Tensor] = {}
    for name, value in values.items():
        match = STACKED.fullmatch(name)
        if match is None:
            named[name] = value
        else:
            named.update({f"{match[1]}.{e}.{match[2]}.weight": part for e, part in enumerate(value)})
    return named


def assert_equal_at_1e5(options: DecoderOptions, theirs: torch.nn.Module) -> None:
    """Returns the logits of two rows and all gradients of their loss."""
    ours = whole_model(options)
    named = their_names(ours.state_dict())
    tied = {"lm_head.weight": named["model.embed_tokens.weight"]} if options.tie_embeddings else {}
    theirs.load_state_dict(named | tied)
    tokens = torch.randint(0, options.vocab_size, (2, 33), generator=torch.Generator().manual_seed(0))
    labels = tokens.roll(-1, 1)
    logits = [run(ours, tokens, [33]), theirs(tokens).logits]
    for found in logits:
        F.cross_entropy(found.flatten(0, 1), labels.flatten()).backward()
    torch.testing.assert_close(*logits, rtol=1e-5, atol=1e-5)
    expected = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    gradients = their_names({name: parameter.grad for name, parameter in ours.named_parameters()})
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        wanted = torch.zeros_like(gradient) if expected[name] is None else expected[name]
        torch.testing.assert_close(gradient, wanted, rtol=1e-5, atol=1e-5, msg=name)
