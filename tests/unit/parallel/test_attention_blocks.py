"""Attention by blocks equals attention over the whole: torch's kernel and the matrix products."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from raypp.job.layer_rules import NO_RULE
from raypp.stages.models import attention_products
from raypp.stages.models.attention_products import attend_by_products, gradients_by_products
from raypp.stages.parallel.ring_hops import attend_block, block_gradients

HEADS, WIDTH = 6, 8


def tensors(queries: int, keys: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(queries + keys)
    shapes = ((queries, HEADS), (keys, kv_heads), (keys, kv_heads), (queries, HEADS))
    return tuple(torch.randn(*shape, WIDTH, dtype=torch.float64, requires_grad=True) for shape in shapes)  # type: ignore[return-value]


def plain(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    heads = (x.transpose(0, 1)[None] for x in (q, k, v))
    return scaled_dot_product_attention(*heads, is_causal=causal, enable_gqa=True)[0].transpose(0, 1)


@pytest.mark.parametrize("kv_heads", [6, 2, 1])
@pytest.mark.parametrize(("queries", "keys", "causal"), [(5, 9, False), (9, 4, False), (7, 7, True), (1, 1, True)])
def test_both_kernels_give_the_numbers_of_plain_attention(
    queries: int, keys: int, causal: bool, kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_products, "TILE", 3)
    offset = 0 if causal else keys
    q, k, v, grad = tensors(queries, keys, kv_heads)
    expected = plain(q, k, v, causal)
    gradients = torch.autograd.grad(expected, (q, k, v), grad)
    with torch.no_grad():
        for attend, backward in (
            (attend_block(q, k, v, causal=causal), block_gradients),
            (
                attend_by_products(q, k, v, offset, NO_RULE),
                lambda *a, causal: gradients_by_products(*a, offset, NO_RULE),
            ),
        ):
            out, lse = attend
            torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
            found = backward(grad, q, k, v, out, lse, causal=causal)
            torch.testing.assert_close(found, gradients, rtol=1e-11, atol=1e-12)


def test_scores_far_from_zero_do_not_overflow() -> None:
    q, k, v, _ = (x.detach() * 200 for x in tensors(4, 6, 2))
    torch.testing.assert_close(attend_by_products(q, k, v, 6, NO_RULE)[0], plain(q, k, v, False))
