"""Tests experts with the grouped kernel on CUDA."""

import pytest
import torch

from raypp.job.decoder_layer import Layer
from raypp.job.models import MoeOptions
from raypp.stages.models import experts, grouped_products
from raypp.stages.models.experts import grouped, one_by_one, swiglu
from raypp.stages.models.lora import unbound
from raypp.stages.models.moe import MixtureOfExperts
from raypp.stages.models.recomputed import recomputed

pytestmark = pytest.mark.gpu


@pytest.fixture(params=["the card's own", "triton"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets experts use the card's kernel, or Triton's as on a card where torch has none."""
    if request.param == "triton":
        for module in (experts, grouped_products):
            monkeypatch.setattr(module, "torch_groups", lambda device: False)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("rows", [[3, 0, 129, 40], [0, 0, 0, 172], [1, 1, 1, 169]], ids=str)
def test_the_grouped_kernel_gives_what_the_loop_gives_in_bf16(rows: list[int]) -> None:
    counts = torch.tensor(rows, device="cuda")
    generator = torch.Generator().manual_seed(0)
    shapes = ((172, 64), (4, 128, 64), (4, 128, 64), (4, 64, 128))
    sources = [torch.randn(shape, generator=generator).mul(0.3).to("cuda", torch.bfloat16) for shape in shapes]
    results = []
    for together in (False, True):
        inputs = [source.clone().requires_grad_() for source in sources]
        if together:
            out = grouped(inputs[0], counts, *inputs[1:])
        else:
            out = one_by_one(inputs[0], rows, swiglu, *map(unbound, inputs[1:]))
        out.square().sum().backward()
        results.append([out, *(t.grad for t in inputs)])
    for looped, at_once in zip(*results, strict=True):
        # bf16 has 8 bits: sums in another order differ by a few roundings.
        error = (looped.float() - at_once.float()).norm() / looped.float().norm()
        assert error <= 2e-2


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("again", [False, True], ids=["kept", "recomputed"])
def test_a_layer_with_experts_on_one_device_never_makes_the_host_wait(again: bool) -> None:
    sizes = {"num_layers": 1, "hidden_size": 64, "num_heads": 2, "vocab_size": 31, "num_experts": 8}
    options = MoeOptions(kind="qwen3_moe", experts_per_token=3, expert_ffn_size=128, **sizes)
    with torch.device("cuda"):
        block = MixtureOfExperts(options, Layer(mlp="experts")).to(torch.bfloat16)
        x = torch.randn(2, 40, 64, dtype=torch.bfloat16, requires_grad=True)
        labelled = torch.ones(2, 40, dtype=torch.bool)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(0, 0.1)
    block.router_sums.take()
    before = torch.cuda.get_sync_debug_mode()
    for mode in ("default", "error"):  # the first round loads kernels
        torch.cuda.set_sync_debug_mode(mode)
        try:
            out = recomputed(block)(x, labelled) if again else block(x, labelled)
            out.backward(torch.ones_like(out))
        finally:
            torch.cuda.set_sync_debug_mode(before)
    assert x.grad is not None and bool(x.grad.any())
