"""A layer with a window keeps as many tokens as its window has, and computes the same bits."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from raypp.job.layer_rules import AttentionRule
from raypp.stages.models.kv_cache import KeyValueCache, attend_one

HEADS, KV, WIDTH, NEW, CAPACITY = 4, 2, 8, 9, 24
CPU = torch.device("cpu")


def computed(
    lengths: list[int],
    cached_as: AttentionRule,
    decode: Callable[[KeyValueCache, Tensor, Tensor, Tensor, list[int]], Tensor],
) -> tuple[KeyValueCache, list[Tensor]]:
    """Fills a cache with prompts of random keys, and calls `decode` for each of the next tokens."""
    random = torch.Generator().manual_seed(7)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    cache, rows, longest = KeyValueCache(CAPACITY), len(lengths), max(lengths)
    flat = rows * longest
    prompts = cache.prompts(lengths, CPU)
    assert prompts.across is not None
    prompts.across(drawn(flat, HEADS, WIDTH), drawn(flat, KV, WIDTH), drawn(flat, KV, WIDTH), cached_as, None)
    found = []
    for step in range(NEW):
        q, k, v = drawn(rows, HEADS, WIDTH), drawn(rows, KV, WIDTH), drawn(rows, KV, WIDTH)
        found.append(decode(cache, q, k, v, [length + step for length in lengths]))
    return cache, found


@pytest.mark.parametrize("lengths", [[12, 12], [15, 3], [2, 5, 11], [1], [4, 15]])
@pytest.mark.parametrize("window", [1, 4, 5, 30])
def test_a_window_bounds_the_cache_and_keeps_the_bits(lengths: list[int], window: int) -> None:
    rule = AttentionRule(window=window)

    def windowed(cache: KeyValueCache, q: Tensor, k: Tensor, v: Tensor, positions: list[int]) -> Tensor:
        across = cache.next_token(positions, CPU).across
        assert across is not None
        return across(q, k, v, rule, None)

    def whole(cache: KeyValueCache, q: Tensor, k: Tensor, v: Tensor, positions: list[int]) -> Tensor:
        keys, values = cache.layers[0]
        at, rows = torch.tensor(positions), torch.arange(len(positions))
        keys[rows, :, at], values[rows, :, at] = k, v
        looked = torch.arange(max(0, min(positions) + 1 - window), max(positions) + 1)
        seen = (looked <= at[:, None]) & (looked > at[:, None] - window)
        return attend_one(q, keys[:, :, looked], values[:, :, looked], seen, rule, None)

    bounded, found = computed(lengths, rule, windowed)
    full, expected = computed(lengths, AttentionRule(), whole)
    assert bounded.layers[0][0].shape[2] == min(window, CAPACITY)
    assert full.layers[0][0].shape[2] == CAPACITY
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
