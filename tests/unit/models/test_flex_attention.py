"""FlexAttention's mask of documents, and its numbers where a CPU can compute them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from raypp.job.layer_rules import NO_RULE, AttentionRule
from raypp.stages.models.attention import packed_attention
from raypp.stages.models.documents import PackedDocuments
from raypp.stages.models.flex_attention import attend, document_mask

RULES = [
    NO_RULE, AttentionRule(window=50), AttentionRule(window=130, soft_cap=3.0), AttentionRule(scale=0.3, sinks=True),
    AttentionRule(window=7, scale=0.1, sinks=True),
]  # fmt: skip
LENGTHS = [
    [5],
    *(pytest.param(lengths, marks=pytest.mark.slow) for lengths in ([140, 77, 128, 3], [128], [129, 127, 128])),
]


def blocks(mask: BlockMask) -> list[list[list[int]]]:
    lists = [
        (mask.kv_num_blocks, mask.kv_indices), (mask.full_kv_num_blocks, mask.full_kv_indices),
        (mask.q_num_blocks, mask.q_indices), (mask.full_q_num_blocks, mask.full_q_indices),
    ]  # fmt: skip

    def chosen(counts: Tensor | None, indices: Tensor | None) -> list[list[int]]:
        assert counts is not None and indices is not None
        return [sorted(row[:count].tolist()) for count, row in zip(counts[0, 0], indices[0, 0], strict=True)]

    return [chosen(*pair) for pair in lists]


@given(st.lists(st.integers(1, 200), min_size=1, max_size=8), st.none() | st.integers(1, 500))
@settings(max_examples=30, deadline=None)
def test_the_mask_is_what_torch_makes_from_all_pairs_of_tokens(lengths: list[int], window: int | None) -> None:
    mask, tokens = document_mask(PackedDocuments.of_lengths(lengths), window), sum(lengths)
    expected = create_block_mask(mask.mask_mod, None, None, tokens, tokens, device="cpu")
    assert blocks(mask) == blocks(expected)
    assert mask.seq_lengths == expected.seq_lengths


# Not compiled: a CPU computes only the forward, and writes out all scores.
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_the_output_is_that_of_the_plain_version(lengths: list[int]) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(sum(lengths), heads, 16, dtype=torch.float64) for heads in (4, 2, 2))
    documents = PackedDocuments.of_lengths(lengths)
    for rule in RULES:
        sinks = torch.tensor([0.5, 2.0, -1.0, 0.0], dtype=torch.float64) if rule.sinks else None
        found = attend(q, k, v, documents, rule, sinks, flex_attention)
        torch.testing.assert_close(found, packed_attention(q, k, v, documents, rule, sinks), rtol=1e-12, atol=1e-12)
