"""Blocks are compiled once for all lengths that a run negotiates; their backwards may be split."""

import random
from typing import Any

import pytest
import torch
from small_models import small_options
from torch import nn

from raypp.stages.models.documents import PackedDocuments
from raypp.stages.models.products import LaterGradients, weights_later
from raypp.stages.models.stage import build_stage
from raypp.stages.parallel.apply import _compile_blocks, recompute_blocks, recompute_within_compiled_blocks


@pytest.mark.parametrize("kind", ["llama", pytest.param("gemma2", marks=pytest.mark.slow)])
def test_twenty_lengths_compile_no_more_than_two(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    compile_, compiled, counts = torch.compile, [], []

    def counting(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda function, **options: compile_(function, backend=counting, **options))
    options = small_options(kind)
    stage = build_stage(options, range(options.num_layers), first=False, last=False).to_empty(device="cpu")
    _compile_blocks(stage)
    choose = random.Random(0)
    for length in choose.sample(range(9, 400), 20):
        documents = PackedDocuments.of_rows([[length - 5, 5], [length]], length)
        positions = torch.arange(length).repeat(2, 1)
        hidden = torch.zeros(2, length, options.hidden_size, requires_grad=True)
        labelled = torch.ones(2, length, dtype=torch.bool)
        stage(hidden, positions_BT=positions, documents=documents, labelled_BT=labelled).sum().backward()
        counts.append(len(compiled))
    assert counts[0] > 0
    assert counts[-1] == counts[1], counts


def gradients(kind: str, extent: str, *, split: bool) -> dict[str, torch.Tensor]:
    """Returns the gradients of compiled blocks after microbatches of two lengths, and of the last
    input. Without code of Inductor: its kernels are the same for both ways."""
    options = small_options(kind)
    stage = build_stage(options, range(options.num_layers), first=False, last=False).to_empty(device="cpu")
    torch.manual_seed(0)
    for one in (*stage.parameters(), *stage.buffers()):
        nn.init.normal_(one, std=0.1)
    if extent == "selective":
        recompute_within_compiled_blocks(stage)
    _compile_blocks(stage)
    if extent == "full":
        recompute_blocks(stage, extent)
    for length in (9, 14):
        documents = PackedDocuments.of_rows([[length - 5, 5], [length]], length)
        hidden = torch.randn(2, length, options.hidden_size, requires_grad=True)
        given = {"positions_BT": torch.arange(length).repeat(2, 1), "documents": documents}
        later = LaterGradients() if split else None
        with weights_later(later):
            out = stage(hidden, **given, labelled_BT=torch.ones(2, length, dtype=torch.bool))
            out.square().mean().backward()
        if later is not None:
            in_first_half = stage.get_parameter("model.layers.0.self_attn.o_proj.weight").grad
            assert length > 9 or in_first_half is None
            later.compute()
    assert not any(getattr(part, "stand_ins", None) for part in stage.modules())
    return {"input": hidden.grad, **{name: one.grad for name, one in stage.named_parameters()}}


@pytest.mark.parametrize(
    ("kind", "extent"),
    [
        ("qwen2", "none"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("llama", "full"), ("qwen2", "selective"), ("qwen3_moe", "selective"), ("deepseek_v3", "none"))
        ),
    ],
)
def test_a_split_backward_of_compiled_blocks_has_the_bits_of_a_whole_one(
    monkeypatch: pytest.MonkeyPatch, kind: str, extent: str
) -> None:
    compile_ = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda function, **options: compile_(function, backend="aot_eager", **options)
    )
    whole, split = (gradients(kind, extent, split=way) for way in (False, True))
    assert whole.keys() == split.keys()
    for name, gradient in whole.items():
        assert gradient is not None and torch.equal(split[name], gradient), name
