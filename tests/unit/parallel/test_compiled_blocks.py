"""Blocks are compiled once for all lengths that a run negotiates, not once for each."""

import random
from typing import Any

import pytest
import torch
from small_models import small_options

from raypp.stages.models.documents import PackedDocuments
from raypp.stages.models.stage import build_stage
from raypp.stages.parallel.apply import _compile_blocks


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
