"""The arithmetic of a step: loss, clip, learning rate."""

from typing import Any

import pytest
import torch

from raypp.job.checks import check_spec
from raypp.job.job import LrSchedule, OptimizerOptions, TrainSection
from raypp.job.load import parse_job
from raypp.rank.joining.lost_peer import lost_peer
from raypp.rank.optimizers.optimizer import build_optimizer
from raypp.rank.optimizers.reduce import coefficient
from raypp.stages.models.loss import token_loss_sum


@pytest.mark.parametrize(
    ("norm", "tokens", "clip_norm", "factor"), [(5.0, 1, 1.0, 0.2), (8.0, 16, 1.0, 1 / 16), (800.0, 16, None, 1 / 16)]
)
def test_gradients_are_divided_by_the_tokens_and_clipped(
    norm: float, tokens: int, clip_norm: float | None, factor: float
) -> None:
    assert coefficient(norm, tokens=tokens, clip_norm=clip_norm) == pytest.approx(factor)


def test_a_gradient_that_is_not_finite_stays_visible() -> None:
    assert not coefficient(float("nan"), tokens=4, clip_norm=1.0) < 1.0


def test_the_loss_is_a_sum_over_labelled_tokens_only() -> None:
    logits = torch.randn(2, 3, 7)
    labels = torch.tensor([[1, -100, 2], [-100, -100, 6]])
    by_hand = sum(
        -torch.log_softmax(logits[b, t], 0)[labels[b, t]] for b in range(2) for t in range(3) if labels[b, t] >= 0
    )
    torch.testing.assert_close(token_loss_sum(logits, labels), by_hand)


def test_a_microbatch_without_a_label_has_loss_and_gradient_zero() -> None:
    logits = torch.randn(1, 4, 5, requires_grad=True)
    loss = token_loss_sum(logits, torch.full((1, 4), -100))
    loss.backward()
    assert float(loss) == 0.0
    assert logits.grad is not None and not logits.grad.any()


@pytest.mark.parametrize(
    ("kind", "step", "expected"),
    [
        ("cosine", 5, 0.5), ("cosine", 10, 1.0), ("cosine", 60, 0.55), ("cosine", 110, 0.1),
        ("linear", 60, 0.55), ("linear", 110, 0.1), ("constant", 110, 1.0),
    ],
)  # fmt: skip
def test_the_learning_rate_warms_up_and_falls_to_its_minimum(kind: str, step: int, expected: float) -> None:
    train = TrainSection(
        steps=110,
        optimizer=OptimizerOptions(lr=1.0),
        lr_schedule=LrSchedule(kind=kind, warmup_steps=10, min_ratio=0.1),  # type: ignore[arg-type]
    )
    assert train.learning_rate(step) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ({"kind": "wsd", "decay_steps": 20}, {10: 1.0, 80: 1.0, 90: 0.5, 100: 0.0}),
        ({"kind": "wsd", "min_ratio": 0.2}, {90: 1.0, 95: 0.6, 100: 0.2}),
        ({"kind": "linear", "decay_steps": 40, "min_ratio": 0.5}, {30: 0.75, 50: 0.5, 100: 0.5}),
        ({"kind": "cosine", "warmup_ratio": 0.29}, {29: 1.0, 28: 28 / 29, 100: 0.0}),
    ],
)
def test_a_rate_may_be_kept_and_fall_within_given_steps(schedule: dict[str, Any], rates: dict[int, float]) -> None:
    train = TrainSection(steps=100, optimizer=OptimizerOptions(lr=1.0), lr_schedule=LrSchedule(**schedule))
    assert {step: train.learning_rate(step) for step in rates} == pytest.approx(rates)


@pytest.mark.parametrize(
    ("schedule", "problem"),
    [
        ({"warmup_steps": 5, "warmup_ratio": 0.1}, "warmup_ratio: warmup_steps: 5 is given, too"),
        ({"kind": "constant", "decay_steps": 5}, "decay_steps: has no effect"),
        (
            {"kind": "wsd", "warmup_steps": 60, "decay_steps": 50},
            "decay_steps: 50 steps before the end of 100, the rate",
        ),
    ],
)
def test_a_schedule_that_contradicts_itself_is_refused(schedule: dict[str, Any], problem: str) -> None:
    train = {"steps": 100, "lr_schedule": schedule}
    (found,) = check_spec(parse_job({"name": "a", "data": {"kind": "synthetic"}, "train": train}))
    assert problem in f"{found.key}: {found.fault}"


def test_weight_decay_leaves_norms_and_biases_alone() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.RMSNorm(4))
    optimizer = build_optimizer([module], OptimizerOptions(weight_decay=0.3))
    decayed = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert {p.ndim: decayed[id(p)] for p in module.parameters()} == {2: 0.3, 1: 0.0}


def test_a_peers_death_is_distinguished_from_an_error_of_ones_own() -> None:
    assert lost_peer(RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:5"))
    assert not lost_peer(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not lost_peer(ValueError("connection closed by peer"))


def test_a_lost_peer_is_known_though_torch_wraps_what_a_forward_raised() -> None:
    def wrapped(inner: Exception) -> RuntimeError:
        outer = RuntimeError("[Stage 0] failed to run forward: args: ('Tensor(torch.Size([2, 64]))')")
        outer.__cause__ = inner
        return outer

    assert lost_peer(wrapped(RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer")))
    assert not lost_peer(wrapped(ValueError("my bug: broken pipe")))
