"""Rotary tables equal those of Hugging Face transformers, in the original context and beyond."""

from typing import Any

import pytest
import torch
from lazily import Lazily
from torch import Tensor

from raypp.job.rope import RopeOptions, Rotary, rope_problems
from raypp.stages.models.documents import PackedDocuments
from raypp.stages.models.rotary import rotary_table, rotated

transformers: Any = Lazily("transformers")

WIDTH, CONTEXT, THETA = 16, 32, 5e5
SHORT, LONG = tuple(1 + 0.1 * i for i in range(8)), tuple(2.0 + i for i in range(8))
SCALINGS: dict[str, tuple[RopeOptions | None, dict[str, Any]]] = {
    "default": (None, {"rope_type": "default"}),
    "linear": (RopeOptions(kind="linear", factor=4), {"rope_type": "linear", "factor": 4.0}),
    "dynamic": (
        RopeOptions(kind="dynamic", factor=4, original_context=CONTEXT),
        {"rope_type": "dynamic", "factor": 4.0},
    ),
    "yarn": (
        RopeOptions(kind="yarn", factor=4, original_context=CONTEXT),
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": CONTEXT},
    ),
    "yarn in full": (
        RopeOptions(
            kind="yarn", factor=8, original_context=4096, beta_fast=16, beta_slow=2, truncate=False,
            attention_factor=0.7,
        ),
        {
            "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096,
            "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False, "attention_factor": 0.7,
        },
    ),
    "llama3": (
        RopeOptions(kind="llama3", factor=8, original_context=8192, low_freq_factor=1, high_freq_factor=4),
        {
            "rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192,
            "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        },
    ),
    "longrope": (
        RopeOptions(kind="longrope", factor=4, original_context=CONTEXT, short_factor=SHORT, long_factor=LONG),
        {
            "rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": CONTEXT,
            "short_factor": list(SHORT), "long_factor": list(LONG),
        },
    ),
}  # fmt: skip


def ours(scaling: RopeOptions | None, lengths: list[int], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    positions = torch.cat([torch.arange(length) for length in lengths])
    return rotary_table(positions, Rotary(WIDTH, THETA, scaling), dtype, PackedDocuments.of_lengths(lengths))


def theirs(parameters: dict[str, Any], length: int) -> tuple[Tensor, Tensor]:
    """The table of a fresh model for one sequence, `[S, D]` each."""
    config = transformers.LlamaConfig(
        hidden_size=2 * WIDTH, num_attention_heads=2, max_position_embeddings=CONTEXT,
        rope_parameters={"rope_theta": THETA, **parameters},
    )  # fmt: skip
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    cos, sin = rotary(torch.zeros(1), torch.arange(length)[None])
    return cos[0], sin[0]


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("length", [CONTEXT - 7, CONTEXT, 3 * CONTEXT])
def test_a_table_is_that_of_transformers(name: str, length: int) -> None:
    scaling, parameters = SCALINGS[name]
    for table, wanted in zip(ours(scaling, [length]), theirs(parameters, length), strict=True):
        torch.testing.assert_close(table[:, 0], wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", SCALINGS)
def test_packed_documents_have_the_tables_that_they_have_alone(name: str) -> None:
    scaling, _ = SCALINGS[name]
    lengths = [5, 3 * CONTEXT, CONTEXT, 40]
    packed = ours(scaling, lengths)
    alone = [ours(scaling, [length]) for length in lengths]
    for index, table in enumerate(packed):
        assert torch.equal(table, torch.cat([part[index] for part in alone]))


def test_padding_does_not_change_the_length_of_a_document() -> None:
    scaling, _ = SCALINGS["dynamic"]
    documents = PackedDocuments.of_rows([[10, CONTEXT - 2], [7]], 2 * CONTEXT)
    assert documents.lengths_S.tolist() == [10] * 10 + [CONTEXT - 2] * (2 * CONTEXT - 10) + [7] * (2 * CONTEXT)
    positions = torch.arange(2 * CONTEXT).repeat(2)
    plain = rotary_table(positions, Rotary(WIDTH, THETA), torch.float32, documents)
    padded = rotary_table(positions, Rotary(WIDTH, THETA, scaling), torch.float32, documents)
    torch.testing.assert_close(padded, plain, rtol=1e-5, atol=1e-5)


def test_a_share_of_the_rows_knows_the_lengths_of_its_documents() -> None:
    whole = PackedDocuments.of_rows([[3, 5], [8]], 8)
    columns = torch.tensor([0, 1, 6, 7]).numpy()
    share = whole.reaching(lambda q, k, v: q, columns, 2)  # type: ignore[arg-type]
    assert share.lengths_S.tolist() == [3, 3, 5, 5, 8, 8, 8, 8]
    assert share.lengths == whole.lengths


def test_a_table_keeps_the_precision_of_wide_dtypes() -> None:
    for scaling, _ in SCALINGS.values():
        wide, narrow = ours(scaling, [3 * CONTEXT], torch.float64)[0], ours(scaling, [3 * CONTEXT])[0]
        assert wide.dtype == torch.float64 and not torch.equal(wide.float(), narrow)
        torch.testing.assert_close(wide.float(), narrow, rtol=1e-4, atol=1e-4)


def test_dims_beyond_the_width_and_layers_without_rotation_are_unchanged() -> None:
    x = torch.randn(6, 2, WIDTH + 4, generator=torch.Generator().manual_seed(0))
    table = ours(None, [6])
    out = rotated(x, table)
    assert torch.equal(out[..., WIDTH:], x[..., WIDTH:])
    assert torch.equal(out[..., :WIDTH], rotated(x[..., :WIDTH].contiguous(), table))
    assert rotated(x, None) is x


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"kind": "linear"}, "model.rope.factor: is missing: kind linear needs it"),
        ({"kind": "linear", "factor": 2, "beta_fast": 3}, "model.rope.beta_fast: kind linear does not use it"),
        ({"kind": "yarn", "factor": 2}, "model.rope.original_context: is missing"),
        (
            {"kind": "llama3", "factor": 2, "original_context": 8, "low_freq_factor": 4, "high_freq_factor": 4},
            "model.rope.high_freq_factor: 4 is not more than low_freq_factor 4",
        ),
        (
            {"kind": "longrope", "original_context": 8, "short_factor": (1.0,), "long_factor": LONG},
            "model.rope.short_factor: has 1 numbers, but 16 rotated dims of a head have 8 frequencies",
        ),
        (
            {"kind": "longrope", "original_context": 8, "short_factor": SHORT, "long_factor": LONG},
            "model.rope.factor: is missing: kind longrope needs it or attention_factor",
        ),
    ],
)
def test_incomplete_scalings_are_refused(given: dict[str, Any], said: str) -> None:
    found = rope_problems(RopeOptions(**given), WIDTH, "model.rope")
    problems = [f"{problem.key}: {problem.fault}" for problem in found]
    assert any(problem.startswith(said) for problem in problems), problems
