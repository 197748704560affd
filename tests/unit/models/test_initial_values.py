"""Initial weights: each number depends on the seed, the name and its place, and on nothing else."""

from typing import Any

import pytest
import torch

from raypp.job.models import DecoderOptions
from raypp.stages.models.adapter_dropout import hash_key
from raypp.stages.models.initial_values import Law, initial_value, initialise, law_of
from raypp.stages.models.stage import build_stage
from raypp.stages.parallel.shard import local_rows

OPTIONS = DecoderOptions(
    num_layers=2, hidden_size=64, num_heads=4, num_kv_heads=2, ffn_size=96, vocab_size=101, lora={"rank": 3, "alpha": 4}
)
NAME = "model.layers.1.mlp.down_proj.weight"


def test_some_rows_have_the_bits_of_the_whole() -> None:
    whole = initial_value(NAME, torch.Size([64, 97]), OPTIONS, 7)
    law, key = law_of(NAME, 2, 97, OPTIONS), hash_key(f"initial:7:{NAME}")
    for rows_R in (torch.arange(64)[5:6], torch.tensor([63, 0, 31])):
        assert torch.equal(law.draw(rows_R, 97, key), whole[rows_R])
    assert not torch.equal(whole, initial_value(NAME, torch.Size([64, 97]), OPTIONS, 8))


def test_normal_numbers_have_the_deviation_asked_for_and_neither_skew_nor_thick_tails() -> None:
    drawn = Law("normal", 0.02).draw(torch.arange(1000), 1001, 5).double().flatten() / 0.02
    assert abs(drawn.mean()) < 0.004 and abs(drawn.std() - 1) < 0.003
    assert abs((drawn**3).mean()) < 0.01 and abs((drawn**4).mean() - 3) < 0.03 and 4 < drawn.abs().max() < 4.6
    rows = drawn.view(1000, 1001)
    assert abs((rows[:, :-1] * rows[:, 1:]).mean()) < 0.004 and abs((rows[:-1] * rows[1:]).mean()) < 0.004


def test_uniform_numbers_fill_their_range() -> None:
    drawn = Law("uniform", 0.25).draw(torch.arange(400), 401, 5)
    assert drawn.min() >= -0.25 and drawn.max() < 0.25 and abs(drawn.mean()) < 0.002
    assert abs(drawn.double().var() - 0.25**2 / 3) < 2e-4


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("normal", [0.00975780189037323, -0.0140255531296134, -0.017056133598089218,
                    -0.010736050084233284, -0.0106552978977561, -0.013890090398490429]),
        ("uniform", [0.007487444672733545, -0.010337404906749725, -0.01212466973811388,
                     -0.008171920664608479, -0.008116072975099087, -0.010252682492136955]),
    ],
)  # fmt: skip
def test_the_bits_are_the_same_on_every_machine_and_in_every_release(kind: Any, expected: list[float]) -> None:
    """A restart on another machine draws the frozen weights again."""
    assert Law(kind, 0.02).draw(torch.tensor([0, 1 << 20]), 3, 42).flatten().tolist() == expected


def test_every_number_that_is_written_counts_as_progress() -> None:
    stage = build_stage(OPTIONS, range(2), first=True, last=True).to_empty(device="cpu")
    reported: list[tuple[int, int]] = []
    initialise(stage, OPTIONS, 7, local_rows, progress=lambda done, total: reported.append((done, total)))
    size = sum(weight.numel() for weight in stage.parameters())
    assert reported[-1] == (size, size) and len(reported) == len(list(stage.parameters()))
    frozen = [name for name, weight in stage.named_parameters() if not weight.requires_grad]
    initialise(
        stage, OPTIONS, 7, local_rows, frozen=True, skip=frozen, progress=lambda done, total: reported.append((0, 0))
    )
    assert reported[-1] == (size, size)
