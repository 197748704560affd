"""Every family's forward runs on CUDA tensors without values: kernels, devices, no waits.

Unlike the fake accelerator of the rank tests, these tensors say that they are on CUDA, so the code
takes the branches of CUDA: attention by one call, experts by the grouped kernel. Nothing is
computed. What needs a value on the host raises, and so does a tensor of another device. No GPU is
needed, only a CUDA build of torch: these tests run in `make test-torch211` and on machines with a
GPU. A backward would need the device.
"""

from typing import Any

import pytest
import torch
from small_models import small_options
from torch import Tensor, nn

from raypp.job.known_families import FAMILIES
from raypp.job.models import DecoderOptions
from raypp.stages.models import delta_rule, latent_attention, layers, shared_keys, short_convolution
from raypp.stages.models.attention import AttentionKernel
from raypp.stages.models.documents import PackedDocuments
from raypp.stages.models.experts import can_group
from raypp.stages.models.loss import IGNORED, Targets
from raypp.stages.models.moe import MixtureOfExperts
from raypp.stages.models.stage import build_stage
from raypp.stages.models.varlen_attention import varlen_kernel
from raypp.stages.parallel.apply import _compile_blocks
from raypp.torch_private import fake_tensors

pytestmark = pytest.mark.skipif(torch.version.cuda is None, reason="this torch is no CUDA build")

CUDA = torch.device("cuda", 0)
ROWS, LENGTHS = 2, [[5, 20, 3], [28]]
TOKENS = 32


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """The card whose branches are taken: one with torch's fast grouped kernel."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))


def on_cuda(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=CUDA)


def kernel_for(options: DecoderOptions) -> AttentionKernel | None:
    capped = any(options.attention_rule(index).soft_cap is not None for index in range(options.num_layers))
    return None if capped else varlen_kernel("varlen")


def stage_of(options: DecoderOptions, layers: range, **ends: bool) -> nn.Module:
    stage = build_stage(options, layers, **ends)
    for module in stage.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            dtype = torch.bfloat16 if parameter.dtype == torch.float32 else parameter.dtype
            made = torch.empty(parameter.shape, dtype=dtype, device=CUDA)
            setattr(module, name, nn.Parameter(made, parameter.requires_grad))
        for name, buffer in list(module.named_buffers(recurse=False)):
            module.register_buffer(name, on_cuda(buffer))
    return stage


def run(options: DecoderOptions) -> None:
    documents = PackedDocuments.of_rows(LENGTHS, TOKENS, kernel=kernel_for(options)).moved(on_cuda)
    tokens = torch.zeros(ROWS, TOKENS, dtype=torch.int64, device=CUDA)
    given: dict[str, Any] = {"positions_BT": tokens, "documents": documents, "labelled_BT": tokens != IGNORED}
    first = stage_of(options, range(1), first=True, last=False)
    last = stage_of(options, range(1, options.num_layers), first=False, last=True)
    out = first(tokens, **given)
    assert (out.device, out.dtype, tuple(out.shape)) == (CUDA, torch.bfloat16, (ROWS, TOKENS, options.hidden_size))
    loss = last(out, **given, targets=Targets(tokens))
    assert (loss.device, loss.dtype, tuple(loss.shape)) == (CUDA, torch.float32, ())
    logits = last(out, **given)
    assert (logits.device, logits.shape[-1]) == (CUDA, options.vocab_size)


def experts_of(kind: str) -> dict[str, Any]:
    return {"expert_ffn_size": 24} if "expert_ffn_size" in FAMILIES[kind].options.model_fields else {}


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_family_runs_on_cuda_without_waiting(kind: str) -> None:
    with fake_tensors():
        run(small_options(kind, **experts_of(kind)))


def test_a_wait_is_found() -> None:
    with fake_tensors(), pytest.raises(Exception, match=r"data-dependent|DataDependent|_local_scalar_dense"):
        torch.zeros(3, device=CUDA).sum().item()


@pytest.mark.parametrize(("capability", "fast"), [((8, 9), False), ((9, 0), True), ((10, 0), True), ((12, 0), False)])
def test_experts_are_grouped_where_the_host_need_not_wait(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], fast: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    with fake_tensors():
        rows = torch.empty(4, 16, dtype=torch.bfloat16, device=CUDA)
        assert can_group(rows, torch.empty(2, 16, 24).bfloat16()) == fast


WIDE = {"hidden_size": 64, "ffn_size": 128, "expert_ffn_size": 64}
QUANTISED = [
    (kind, {**WIDE, "lora": {"rank": 4, "base": base, "dropout": 0.1}}) for kind in FAMILIES for base in ("int8", "nf4")
]
COMPILED = [*((kind, {}) for kind in FAMILIES), *(case for case in QUANTISED if case[0] in ("llama", "gpt_oss"))]


@pytest.mark.parametrize(("kind", "changed"), COMPILED)
def test_each_block_compiles_to_one_graph_for_all_lengths(
    monkeypatch: pytest.MonkeyPatch, kind: str, changed: dict[str, Any]
) -> None:
    """But for attention, the delta rule and experts, which the compiler leaves alone."""
    compile_, compiled = torch.compile, []

    def counting(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    def whole(function: Any, **options: Any) -> Any:
        return compile_(function, backend=counting, fullgraph=True, **options)

    monkeypatch.setattr(torch, "compile", whole)
    for module in (layers, latent_attention, shared_keys):
        monkeypatch.setattr(module, "packed_attention", lambda q_SHD, *_: q_SHD.clone())
    monkeypatch.setattr(
        delta_rule,
        "mixed_by_rule",
        lambda mixed_SC, decay_SH, _beta, _weight, rule, *_: mixed_SC.new_zeros(
            len(mixed_SC), rule.value_heads, rule.value_dim
        ),
    )
    monkeypatch.setattr(short_convolution, "convolved", lambda x_SC, *_: x_SC.clone())
    monkeypatch.setattr(MixtureOfExperts, "forward", lambda self, x_BTC, labelled_BT: x_BTC.clone())
    torch.compiler.reset()
    sizes = {name: value for name, value in changed.items() if name in FAMILIES[kind].options.model_fields}
    options = small_options(kind, **{**experts_of(kind), **sizes})
    with fake_tensors():
        stage = stage_of(options, range(options.num_layers), first=False, last=False)
        _compile_blocks(stage)
        for tokens in (60, 31, 200, 17):  # none is another size: equal sizes are taken for one
            documents = PackedDocuments.of_rows([[tokens - 5, 5], [tokens]], tokens, kernel=kernel_for(options))
            positions = torch.zeros(2, tokens, dtype=torch.int64, device=CUDA)
            hidden = torch.empty(2, tokens, options.hidden_size, dtype=torch.bfloat16, device=CUDA)
            arguments = {"positions_BT": positions, "documents": documents.moved(on_cuda), "labelled_BT": positions > 0}
            assert stage(hidden, **arguments).shape == hidden.shape
            assert len(compiled) == options.num_layers
