"""Layers with a state: documents do not meet, a cache goes on. The delta rule's chunks are the
recurrence."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from their_models import keys_of, loaded, their_config, their_instance
from torch import Tensor, nn

from raypp.job.layer_rules import DeltaRule
from raypp.stages.models.delta_rule import mixed_by_rule
from raypp.stages.models.documents import PackedDocuments
from raypp.stages.models.kv_cache import KeyValueCache

KINDS = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "lfm2")
RULE = DeltaRule(key_heads=2, value_heads=4, key_dim=5, value_dim=3, kernel=4)
ROWS = [[3, 70, 1, 56], [130], [2, 128]]
CPU = torch.device("cpu")


def drawn(tokens: int, **changed: Any) -> list[Tensor]:
    """Returns random inputs of `mixed_by_rule`; the decay is from nearly none to nearly all."""
    random = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    decay = -torch.exp(2 * normal(tokens, RULE.value_heads))
    beta = torch.sigmoid(normal(tokens, RULE.value_heads))
    return [normal(tokens, RULE.channels), decay, beta, normal(RULE.channels, 1, RULE.kernel)]


def token_by_token(mixed: Tensor, decay: Tensor, beta: Tensor, weight: Tensor) -> Tensor:
    """Computes one document by the definition."""
    padded = F.pad(mixed, (0, 0, RULE.kernel - 1, 0)).T[None]
    q, k, v = torch.split(
        F.silu(F.conv1d(padded, weight, groups=RULE.channels))[0].T, [RULE.keys, RULE.keys, RULE.values], -1
    )
    served = RULE.value_heads // RULE.key_heads
    q, k = (part.reshape(len(mixed), RULE.key_heads, -1).repeat_interleave(served, 1) for part in (q, k))
    q, k = (part * torch.rsqrt(part.square().sum(-1, keepdim=True) + 1e-6) for part in (q, k))
    v = v.reshape(len(mixed), RULE.value_heads, -1)
    state, out = mixed.new_zeros(RULE.value_heads, RULE.key_dim, RULE.value_dim), []
    for token in range(len(mixed)):
        state = state * decay[token].exp()[:, None, None]
        known = (k[token][:, None] @ state)[:, 0]
        change = beta[token][:, None] * (v[token] - known)
        state = state + k[token][:, :, None] * change[:, None]
        out.append((q[token][:, None] @ state)[:, 0] * RULE.key_dim**-0.5)
    return torch.stack(out)


def test_chunks_and_their_gradients_are_the_recurrence_of_each_document() -> None:
    lengths = [length for row in ROWS for length in row]
    inputs = [one.requires_grad_() for one in drawn(sum(lengths))]
    found = mixed_by_rule(*inputs, RULE, PackedDocuments.of_lengths(lengths))
    parts = zip(*(torch.split(one, lengths) for one in inputs[:3]), strict=True)
    expected = torch.cat([token_by_token(*part, inputs[3]) for part in parts])
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    slope = torch.linspace(-1, 1, found.numel(), dtype=torch.float64).view_as(found)
    ours, theirs = (torch.autograd.grad((out * slope).sum(), inputs) for out in (found, expected))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


def test_a_fast_decay_loses_no_digits_in_fp32() -> None:
    """Sums of the decay from the first token on reach 1e3, and their differences 1e-4."""
    inputs = drawn(64)
    inputs[1] = torch.where(torch.arange(64)[:, None] % 2 == 0, -40.0, -0.01).expand(64, RULE.value_heads).double()
    documents = PackedDocuments.of_lengths([64])
    narrow = [one.float() for one in inputs]
    wide = mixed_by_rule(*(one.double() for one in narrow), RULE, documents)
    torch.testing.assert_close(mixed_by_rule(*narrow, RULE, documents).double(), wide, rtol=1e-5, atol=1e-6)


@cache
def made(kind: str, folder: Path) -> tuple[Any, nn.Module]:
    model = their_instance(kind, their_config(kind, {**keys_of(kind, "plain"), "max_position_embeddings": 256}))
    model.save_pretrained(folder)
    return model, loaded(folder)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_packed_documents_are_those_that_transformers_computes_one_by_one(kind: str, tmp_path: Path) -> None:
    theirs, ours = made(kind, tmp_path)
    tokens = torch.randint(0, 97, (len(ROWS), 130), generator=torch.Generator().manual_seed(0))
    pieces = [piece for row, lengths in zip(tokens, ROWS, strict=True) for piece in row.split(lengths)]
    expected = torch.cat([theirs(piece[None]).logits[0] for piece in pieces])
    positions = torch.stack([torch.cat([torch.arange(length) for length in lengths]) for lengths in ROWS])
    found = ours(tokens, positions, PackedDocuments.of_rows(ROWS, 130)).flatten(0, 1)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_decoding_by_the_state_goes_on_as_whole_rows_do(kind: str, tmp_path: Path) -> None:
    """Prompts shorter than the convolution, of a chunk and more, in one group."""
    theirs, ours = made(kind, tmp_path)
    ours.double()
    rows = [list(range(3, 3 + length)) for length in (2, 70, 1, 64)]
    longest, cached = max(map(len, rows)), KeyValueCache(90)
    given = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    prompts = cached.prompts([len(row) for row in rows], CPU)
    ours(given, torch.arange(longest).expand(len(rows), -1), prompts)
    for _ in range(6):
        for row in rows:
            row.append((row[-1] * 7) % 97)
        last = [len(row) - 1 for row in rows]
        step = ours(
            torch.tensor([[row[-1]] for row in rows]), torch.tensor(last)[:, None], cached.next_token(last, CPU)
        )
        for row, logits in zip(rows, step[:, 0], strict=True):
            whole = ours(torch.tensor([row]), torch.arange(len(row))[None], PackedDocuments.of_lengths([len(row)]))
            torch.testing.assert_close(logits, whole[0, -1], rtol=1e-10, atol=1e-10)
            known = theirs(torch.tensor([row])).logits[0, -1]
            torch.testing.assert_close(logits.float(), known, rtol=1e-5, atol=2e-5)
    assert sum(len(tensors) for tensors in cached.layers) == 6
