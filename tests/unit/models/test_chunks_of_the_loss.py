"""The loss in chunks of tokens: its numbers, its memory, and when it is used."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from raypp.job.models import DecoderOptions
from raypp.planning import loss_memory
from raypp.planning.loss_memory import chunk_sizes, chunk_tokens
from raypp.stages.models import loss
from raypp.stages.models.documents import PackedDocuments
from raypp.stages.models.loss import (
    IGNORED,
    Targets,
    in_chunks,
    loss_sum_in_chunks,
    losses_and_errors,
    soft_capped,
    token_loss_sum,
)
from raypp.stages.models.products import LaterGradients, weights_later
from raypp.stages.models.stage import build_stage

ROWS, TOKENS, WIDTH, VOCABULARY, CHUNK = 2, 95, 24, 100, 48
BOUNDS = {torch.float32: 1e-6, torch.float64: 1e-15, torch.bfloat16: 1e-2}
"""On the relative error. In bf16 the gradient of the projection is rounded once per chunk: 2^-9
each. Measured: 3e-7, 4e-16, 3e-3."""


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_memory, "CPU_BYTES", 4 * VOCABULARY * CHUNK)


def drawn(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the norm's output `[B, T, C]`, the projection `[V, C]` and the labels `[B, T]`."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, TOKENS, WIDTH, generator=generator).to(dtype)
    weight = (torch.randn(VOCABULARY, WIDTH, generator=generator) * 0.3).to(dtype)
    labels = torch.randint(0, VOCABULARY, (ROWS, TOKENS), generator=generator)
    labels[0, :7] = labels[1, 60:] = IGNORED
    return x.requires_grad_(), weight.requires_grad_(), labels


def results(loss: Tensor, x: Tensor, weight: Tensor) -> list[Tensor]:
    return [loss.detach(), *torch.autograd.grad(loss, [x, weight])]


@pytest.mark.parametrize("cap", [None, 1.5])
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_loss_and_gradients_are_those_from_whole_logits(dtype: torch.dtype, cap: float | None) -> None:
    x, weight, labels = drawn(dtype)
    expected = results(token_loss_sum(soft_capped(F.linear(x, weight), cap), labels), x, weight)
    chunked = loss_sum_in_chunks(x, weight, Targets(labels), cap)
    for found, value in zip(results(chunked, x, weight), expected, strict=True):
        assert found.dtype == value.dtype and found.shape == value.shape
        assert float((found.double() - value.double()).norm()) <= BOUNDS[dtype] * float(value.double().norm())


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_the_moment_of_the_projections_gradient_changes_no_bit(dtype: torch.dtype) -> None:
    x, weight, labels = drawn(dtype)
    for cap in (None, 1.5):
        now, later = (
            results(loss_sum_in_chunks(x, weight, Targets(labels, when), cap), x, weight) for when in (True, False)
        )
        assert all(torch.equal(a, b) for a, b in zip(now, later, strict=True))


def test_where_a_kernel_computes_it_few_logits_are_one_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, labels = drawn(torch.bfloat16)
    x, labels = x[:1, :CHUNK].detach().requires_grad_(), labels[:1, :CHUNK]
    assert not in_chunks(x, weight)
    monkeypatch.setattr(loss, "for_chunks", lambda device: lambda *given: losses_and_errors(*given))
    assert in_chunks(x, weight)
    expected = results(token_loss_sum(F.linear(x, weight), labels), x, weight)
    for ours, value in zip(results(loss_sum_in_chunks(x, weight, Targets(labels)), x, weight), expected, strict=True):
        assert ours.dtype == value.dtype
        assert float((ours.double() - value.double()).norm()) <= BOUNDS[torch.bfloat16] * float(value.double().norm())


def test_the_gradients_are_scaled_by_what_follows() -> None:
    x, weight, labels = drawn()
    _, x_grad, weight_grad = results(loss_sum_in_chunks(x, weight, Targets(labels)), x, weight)
    _, x_twice, weight_twice = results(2 * loss_sum_in_chunks(x, weight, Targets(labels)), x, weight)
    assert torch.equal(x_twice, 2 * x_grad) and torch.equal(weight_twice, 2 * weight_grad)


def test_a_second_backward_is_refused() -> None:
    x, weight, labels = drawn()
    loss = loss_sum_in_chunks(x, weight, Targets(labels))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_without_gradients_the_loss_has_the_same_bits() -> None:
    x, weight, labels = drawn()
    with torch.no_grad():
        loss = loss_sum_in_chunks(x, weight, Targets(labels))
    assert not loss.requires_grad and torch.equal(loss, loss_sum_in_chunks(x, weight, Targets(labels)).detach())


@pytest.mark.parametrize("cap", [None, 1.5])
def test_without_gradients_those_of_the_logits_are_not_computed(cap: float | None) -> None:
    x, weight, labels = drawn()
    computed = []
    for grad in (True, False):
        with torch.set_grad_enabled(grad), profile(activities=[ProfilerActivity.CPU]) as profiler:
            loss_sum_in_chunks(x, weight, Targets(labels), cap)
        computed.append({"aten::exp_", "aten::scatter_add_"} & {event.key for event in profiler.key_averages()})
    assert computed == [{"aten::exp_", "aten::scatter_add_"}, set()]


def test_a_microbatch_without_a_label_has_loss_and_gradients_zero() -> None:
    x, weight, labels = drawn()
    found = results(loss_sum_in_chunks(x, weight, Targets(torch.full_like(labels, IGNORED))), x, weight)
    assert not any(value.any() for value in found)


def largest_allocation(step: Callable[[], None]) -> int:
    """Returns the most bytes that one operator of a step leaves allocated."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        step()
    return max(event.self_cpu_memory_usage for event in seen.events())


@pytest.mark.parametrize("backward_next", [True, False])
def test_no_tensor_is_larger_than_the_logits_of_a_chunk(backward_next: bool) -> None:
    x, weight, labels = drawn()
    chunked = largest_allocation(loss_sum_in_chunks(x, weight, Targets(labels, backward_next)).backward)
    forward = largest_allocation(lambda: loss_sum_in_chunks(x, weight, Targets(labels, backward_next)))
    whole = largest_allocation(lambda: token_loss_sum(F.linear(x, weight), labels))
    assert max(chunked, forward) == 4 * CHUNK * VOCABULARY
    assert whole == 4 * ROWS * TOKENS * VOCABULARY


def last_stage(**settings: Any) -> nn.Module:
    options = DecoderOptions(
        kind="llama", num_layers=1, hidden_size=WIDTH, num_heads=2, ffn_size=32, vocab_size=VOCABULARY, **settings
    )
    stage = build_stage(options, range(1), first=False, last=True).to_empty(device="cpu")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in stage.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return stage


def arguments(length: int) -> tuple[Tensor, Tensor, PackedDocuments]:
    x = torch.randn(1, length, WIDTH, generator=torch.Generator().manual_seed(2))
    return x, torch.arange(length)[None], PackedDocuments.of_rows([[length]], length)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("length", [CHUNK, CHUNK + 1])
def test_a_stage_returns_logits_or_with_targets_their_loss(tied: bool, length: int) -> None:
    stage, given = last_stage(tie_embeddings=tied), arguments(length)
    labels = torch.randint(0, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(3))
    assert in_chunks(given[0], stage.get_parameter("model.embed_tokens.weight" if tied else "lm_head.weight")) == (
        length > CHUNK
    )
    loss, logits = stage(*given, targets=Targets(labels)), stage(*given)
    assert logits.shape == (1, length, VOCABULARY)
    expected = token_loss_sum(logits, labels)
    if length <= CHUNK:
        assert torch.equal(loss, expected)
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize("backward_next", [True, False])
@pytest.mark.parametrize("tied", [False, True])
def test_a_backward_in_two_halves_gives_the_gradients_of_a_whole_one(backward_next: bool, tied: bool) -> None:
    stage, (x, positions, documents) = last_stage(tie_embeddings=tied), arguments(3 * CHUNK)
    labels = torch.randint(0, VOCABULARY, (1, 3 * CHUNK), generator=torch.Generator().manual_seed(3))
    targets = Targets(labels, backward_next)
    whole = x.clone().requires_grad_()
    stage(whole, positions, documents, targets=targets).backward()
    expected = {name: parameter.grad for name, parameter in stage.named_parameters()}
    stage.zero_grad()

    halved = x.clone().requires_grad_()
    later = LaterGradients()
    with weights_later(later):
        stage(halved, positions, documents, targets=targets).backward()
    assert torch.equal(halved.grad, whole.grad)
    later.compute()
    assert all(torch.equal(parameter.grad, expected[name]) for name, parameter in stage.named_parameters())


def test_a_chunk_depends_on_the_vocabulary_and_the_kind_of_device_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert [chunk_tokens(152_000, kind) for kind in ("cpu", "cuda")] == [208, 1760]
    assert chunk_tokens(4096, "cpu") == 8192
    assert chunk_tokens(10**9, "cpu") == 16
    assert chunk_sizes(4096, 152_000, "cpu") == [205] * 19 + [201]
    assert chunk_sizes(208, 152_000, "cpu") == [208]
