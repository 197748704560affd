"""Windows, soft caps, scales and sinks: outputs and gradients of all scores written out."""

import pytest
import torch
from torch import Tensor

from raypp.job.layer_rules import NO_RULE, AttentionRule
from raypp.stages.models import attention_products
from raypp.stages.models.attention import packed_attention
from raypp.stages.models.documents import PackedDocuments

RULES = [
    NO_RULE, AttentionRule(scale=0.3), AttentionRule(window=1), AttentionRule(window=4), AttentionRule(window=99),
    AttentionRule(soft_cap=1.5), AttentionRule(sinks=True),
    AttentionRule(window=5, soft_cap=2.0, scale=0.2, sinks=True),
]  # fmt: skip
LENGTHS = [[11], [6, 6], [1, 9, 4, 13]]
HEADS, KV_HEADS, WIDTH = 4, 2, 8


def inputs(tokens: int, rule: AttentionRule, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Returns queries, keys, values and sinks if the rule has them."""
    torch.manual_seed(tokens)
    shapes = [(tokens, HEADS, WIDTH), *[(tokens, KV_HEADS, WIDTH)] * 2, *[(HEADS,)] * rule.sinks]
    return [torch.randn(*shape, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def written_out(leaves: list[Tensor], lengths: list[int], rule: AttentionRule) -> Tensor:
    q, k, v, *sinks = leaves
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * (WIDTH**-0.5 if rule.scale is None else rule.scale)
    if rule.soft_cap is not None:
        scores = rule.soft_cap * torch.tanh(scores / rule.soft_cap)
    at = torch.arange(len(q))
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    seen = (at[:, None] >= at) & (document[:, None] == document)
    if rule.window is not None:
        seen &= at[:, None] - at < rule.window
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks:
        scores = torch.cat((scores, sinks[0][:, None, None].expand(-1, len(q), 1)), dim=-1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(q)], v)


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_the_plain_version_is_that_of_all_scores(
    lengths: list[int], rule: AttentionRule, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_products, "TILE", 3)
    leaves = inputs(sum(lengths), rule)
    q, k, v, *sinks = leaves
    found = packed_attention(q, k, v, PackedDocuments.of_lengths(lengths), rule, *sinks)
    expected = written_out(leaves, lengths, rule)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    gradient = torch.randn_like(expected)
    pairs = (torch.autograd.grad(out, leaves, gradient) for out in (found, expected))
    torch.testing.assert_close(*pairs, rtol=1e-11, atol=1e-12)


def test_a_window_that_no_document_exceeds_changes_no_bit() -> None:
    leaves = inputs(30, NO_RULE, torch.float32)
    documents = PackedDocuments.of_lengths([12, 18])
    rules = NO_RULE, AttentionRule(window=18)
    results = []
    for rule in rules:
        out = packed_attention(*leaves, documents, rule)
        results.append([out, *torch.autograd.grad(out.sum(), leaves)])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_scores_far_from_zero_do_not_overflow() -> None:
    leaves = [x.detach() * 200 for x in inputs(9, AttentionRule(sinks=True))]
    q, k, v, sinks = leaves
    rule = AttentionRule(window=3, sinks=True)
    found = packed_attention(q, k, v, PackedDocuments.of_lengths([9]), rule, sinks)
    torch.testing.assert_close(found, written_out(leaves, [9], rule))


def test_the_gradients_of_sinks_and_of_inputs_can_be_computed_at_different_times() -> None:
    """As a split backward does: the attention's own backward runs once."""
    rule = AttentionRule(window=3, sinks=True)
    q, k, v, sinks = inputs(9, rule)
    out = packed_attention(q, k, v, PackedDocuments.of_lengths([9]), rule, sinks)
    [alone] = torch.autograd.grad(out.sum(), [sinks], retain_graph=True)
    together = torch.autograd.grad(out.sum(), [q, k, v, sinks])
    assert torch.equal(alone, together[-1]) and alone.abs().min() > 0
