"""Packed documents, padding, and parts of a Llama under global names."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from raypp.job.models import DecoderOptions
from raypp.stages.models.documents import PackedDocuments
from raypp.stages.models.initial_values import initial_value
from raypp.stages.models.stage import build_stage, parameter_names

OPTIONS = DecoderOptions(
    kind="llama", num_layers=3, hidden_size=48, num_heads=4, num_kv_heads=2, ffn_size=80, vocab_size=97,
    rope_theta=10000.0,
)  # fmt: skip


def whole_model(options: DecoderOptions) -> torch.nn.Module:
    model = build_stage(options, range(options.num_layers), first=True, last=True).to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(initial_value(name, parameter.shape, options, 7) * (5 if parameter.ndim > 1 else 1))
    return model


def run(model: torch.nn.Module, tokens: torch.Tensor, documents: list[int]) -> torch.Tensor:
    positions = torch.cat([torch.arange(n) for n in documents])[None].expand_as(tokens)
    packed = PackedDocuments.of_rows([documents] * len(tokens), tokens.shape[1])
    return model(tokens, positions, packed)


def test_packed_documents_never_attend_across_their_borders() -> None:
    model = whole_model(OPTIONS)
    tokens = torch.randint(0, 97, (1, 30), generator=torch.Generator().manual_seed(1))
    packed = run(model, tokens, [11, 12, 7])
    alone = torch.cat([run(model, tokens[:, a:b], [b - a]) for a, b in ((0, 11), (11, 23), (23, 30))], dim=1)
    torch.testing.assert_close(packed, alone, rtol=1e-5, atol=1e-5)


def test_padding_changes_no_real_token() -> None:
    model = whole_model(OPTIONS)
    tokens = torch.randint(0, 97, (1, 20), generator=torch.Generator().manual_seed(2))
    padded = F.pad(tokens, (0, 12))
    positions = torch.cat([torch.arange(8), torch.arange(24)])[None]
    documents = PackedDocuments.of_rows([[8, 12]], 32)
    torch.testing.assert_close(
        model(padded, positions, documents)[:, :20], run(model, tokens, [8, 12]), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(
    ("cu_seqlens", "target", "grown", "longest"),
    [([0, 300, 700], 1024, [0, 300, 1024], 724), ([0, 10, 20, 30], 128, [0, 10, 20, 128], 108)],
)
def test_padding_grows_the_last_document(cu_seqlens: list[int], target: int, grown: list[int], longest: int) -> None:
    rows = [[b - a for a, b in itertools.pairwise(cu_seqlens)]]
    documents = PackedDocuments.of_rows(rows, target)
    assert documents.max_len == longest
    assert documents.cu_seqlens.tolist() == grown


def test_a_stage_holds_only_its_part_under_global_names() -> None:
    middle = build_stage(OPTIONS, range(1, 2), first=False, last=False)
    assert all(name.startswith("model.layers.1.") for name, _ in middle.named_parameters())
    assert all(parameter.is_meta for parameter in middle.parameters())
    cut = [
        build_stage(OPTIONS, range(2), first=True, last=False),
        build_stage(OPTIONS, range(2, 3), first=False, last=True),
    ]
    assert sorted(name for stage in cut for name, _ in stage.named_parameters()) == parameter_names(OPTIONS)


def test_initial_values_depend_on_seed_and_name_only() -> None:
    shape = torch.Size([48, 48])
    name = "model.layers.1.self_attn.q_proj.weight"
    assert torch.equal(initial_value(name, shape, OPTIONS, 1), initial_value(name, shape, OPTIONS, 1))
    assert not torch.equal(initial_value(name, shape, OPTIONS, 1), initial_value(name, shape, OPTIONS, 2))
    assert torch.equal(initial_value("model.norm.weight", torch.Size([48]), OPTIONS, 1), torch.ones(48))
