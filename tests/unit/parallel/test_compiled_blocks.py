"""A block is compiled once, whatever its microbatches hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from raypp.models.documents import PackedDocuments
from raypp.models.stage import build_stage
from raypp.spec.models import DecoderOptions


@pytest.mark.slow
@pytest.mark.gate
def test_neither_lengths_nor_the_number_of_documents_compile_a_block_again() -> None:
    """torch compiles a block eight times at most, and then runs it uncompiled."""
    sizes = {"num_layers": 2, "hidden_size": 16, "num_heads": 2, "ffn_size": 24, "vocab_size": 31}
    stage = build_stage(DecoderOptions(kind="llama", **sizes), range(2), first=True, last=True).to_empty(device="cpu")
    graphs: list[Any] = []

    def count(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    for block in stage.model.layers.children():
        block.forward = torch.compile(block.forward, backend=count, dynamic=True)
    compiled = []
    for tokens, documents in ((24, [24]), (40, [10, 30]), (16, [3, 4, 9]), (56, [8] * 7), (32, [2] * 16)):
        rows = [documents, [tokens]]
        packed = PackedDocuments.of_rows(rows, tokens)
        given = torch.zeros(2, tokens, dtype=torch.int64)
        stage(given, given, packed, given.bool())
        compiled.append(len(graphs))
    # The first microbatch finds documents of one length, and some guards on tensors settle.
    assert 0 < compiled[1] == compiled[-1]
