"""What selective recomputation keeps of a block, and which blocks it refuses."""

import pytest
import torch
from torch import nn

from raypp.errors import RayppError
from raypp.job.models import DecoderOptions, MoeOptions
from raypp.stages.models.documents import PackedDocuments
from raypp.stages.models.stage import build_stage
from raypp.stages.parallel.apply import recompute_within_compiled_blocks

SIZES = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "ffn_size": 64, "vocab_size": 31}
DENSE = DecoderOptions(kind="llama", **SIZES)
EXPERTS = MoeOptions(kind="qwen3_moe", num_experts=4, experts_per_token=2, expert_ffn_size=64, **SIZES)


def stage_of(options: DecoderOptions) -> nn.Module:
    stage = build_stage(options, range(1), first=True, last=True).to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in stage.parameters():
            parameter.normal_(0, 0.3, generator=generator)
    return stage


def run(stage: nn.Module) -> tuple[int, list[torch.Tensor]]:
    """Returns the bytes that a forward of 24 tokens keeps for its backward, and the gradients."""
    kept: dict[int, int] = {}

    def see(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    documents = PackedDocuments.of_rows([[10, 14]], 24)
    with torch.autograd.graph.saved_tensors_hooks(see, lambda tensor: tensor):
        out = stage(torch.arange(24)[None], torch.arange(24)[None], documents)
    out.square().sum().backward()
    gradients = [parameter.grad for parameter in stage.parameters() if parameter.grad is not None]
    return sum(kept.values()), gradients


@pytest.mark.parametrize("options", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_what_a_compiler_would_be_given_recomputes_the_feed_forward_to_the_same_bits(options: DecoderOptions) -> None:
    everything, reference = run(stage_of(options))
    stage = stage_of(options)
    recompute_within_compiled_blocks(stage)
    kept, gradients = run(stage)
    assert kept < everything
    assert all(torch.equal(one, two) for one, two in zip(gradients, reference, strict=True))


def test_a_block_of_an_own_model_without_a_feed_forward_is_refused_by_name() -> None:
    stage = nn.Module()
    stage.model = nn.Module()
    stage.model.layers = nn.ModuleList([nn.Linear(3, 3)])
    with pytest.raises(RayppError, match="Linear has no method feed") as refused:
        recompute_within_compiled_blocks(stage)
    assert "full or none" in str(refused.value)
