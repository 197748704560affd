"""Router losses, and experts with few rows or none."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from reference import run, whole_model
from torch.utils.checkpoint import checkpoint

from raypp.job.decoder_layer import Layer
from raypp.job.models import MoeOptions, RouterOptions
from raypp.stages.models.experts import StackedExperts, grouped, one_by_one, swiglu
from raypp.stages.models.lora import unbound
from raypp.stages.models.moe import MixtureOfExperts, chosen_experts, router_sums, weighted
from raypp.stages.models.products import _GradientOfRows

NAMES = ("gate_proj", "up_proj", "down_proj")


def options(**other: Any) -> MoeOptions:
    sizes = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "vocab_size": 31, "num_experts": 5}
    return MoeOptions(kind="qwen3_moe", experts_per_token=2, expert_ffn_size=24, **{**sizes, **other})


def routed(settings: MoeOptions, tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logits = 2 * torch.randn(tokens, settings.num_experts, generator=torch.Generator().manual_seed(seed))
    probabilities = logits.softmax(-1)
    return logits, probabilities, probabilities.topk(settings.experts_per_token, dim=-1).indices


def random_experts(count: int = 4) -> StackedExperts:
    experts = StackedExperts(count, 16, 24, NAMES)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_(0, 0.3, generator=generator)
    return experts


def random_block(**other: Any) -> MixtureOfExperts:
    block = MixtureOfExperts(options(**other), Layer(mlp="experts"))
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(0, 0.3, generator=generator)
    return block


def test_the_balance_loss_is_that_of_transformers_times_the_tokens() -> None:
    modeling = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    settings = options(aux_loss_weight=1.0)
    logits, probabilities, chosen = routed(settings, 40)
    labelled = torch.arange(40) % 3 > 0
    expected = modeling.load_balancing_loss_func((logits,), 5, 2, attention_mask=labelled[None].long())
    found = weighted(router_sums(logits, probabilities, chosen, labelled), settings)
    torch.testing.assert_close(found, expected * labelled.sum())


def test_the_z_loss_is_the_sum_of_squared_log_partition_functions() -> None:
    settings = options(aux_loss_weight=0.0, z_loss_weight=0.5)
    logits, probabilities, chosen = routed(settings, 12)
    labelled = torch.arange(12) < 7
    expected = 0.5 * logits[:7].exp().sum(-1).log().square().sum()
    torch.testing.assert_close(weighted(router_sums(logits, probabilities, chosen, labelled), settings), expected)


def test_a_microbatch_without_a_label_has_no_router_loss() -> None:
    settings = options(aux_loss_weight=1.0, z_loss_weight=1.0)
    logits, probabilities, chosen = routed(settings, 12)
    nothing = torch.zeros(12, dtype=torch.bool)
    assert float(weighted(router_sums(logits, probabilities, chosen, nothing), settings)) == 0.0


def test_the_gradient_is_that_of_the_output_and_the_router_losses_together() -> None:
    block = random_block(aux_loss_weight=0.7, z_loss_weight=0.3)
    x = torch.randn(2, 9, 16, generator=torch.Generator().manual_seed(3))
    labelled = torch.arange(18).view(2, 9) % 4 > 0
    block(x, labelled).square().sum().backward()
    found = {name: parameter.grad.clone() for name, parameter in block.named_parameters()}

    block.zero_grad()
    logits = block.gate(x.view(-1, 16))
    probabilities = logits.softmax(-1)
    chosen = probabilities.topk(2, dim=-1).indices
    loss = weighted(router_sums(logits, probabilities, chosen, labelled.flatten()), block.options)
    assert float(loss.detach()) > 1
    (block(x).square().sum() + loss).backward()
    for name, parameter in block.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, msg=name)


def test_router_sums_are_noted_once_also_when_activations_are_recomputed() -> None:
    block = random_block()
    labelled = torch.arange(18).view(2, 9) % 4 > 0
    taken = []
    for again in (False, True):
        for seed in (3, 4):
            x = torch.randn(2, 9, 16, generator=torch.Generator().manual_seed(seed), requires_grad=True)
            out = checkpoint(block, x, labelled, use_reentrant=False) if again else block(x, labelled)
            out.sum().backward()
        taken.append(block.router_sums.take())
    assert torch.equal(*taken) and bool((taken[0] > 1).all())
    assert block.router_sums.take() is None


def test_router_losses_reach_every_layer_and_are_averaged_over_them() -> None:
    settings = options(num_layers=2, aux_loss_weight=0.0, z_loss_weight=1.0)
    model = whole_model(settings)
    tokens = torch.arange(12)[None]
    run(model, tokens, [12], labelled_BT=torch.ones(1, 12, dtype=torch.bool)).mul(0).sum().backward()
    gates = [model.model.layers[layer].mlp.gate.weight.grad for layer in ("0", "1")]
    assert all(float(gradient.abs().max()) > 0 for gradient in gates)
    alone = whole_model(options(num_layers=2, aux_loss_weight=0.0, z_loss_weight=0.5))
    run(alone, tokens, [12], labelled_BT=torch.ones(1, 12, dtype=torch.bool)).mul(0).sum().backward()
    torch.testing.assert_close(gates[1], 2 * alone.model.layers["1"].mlp.gate.weight.grad)


def test_nothing_is_added_where_no_gradient_is_wanted() -> None:
    block = random_block(aux_loss_weight=1.0)
    x = torch.randn(1, 4, 16, generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        assert torch.equal(block(x, torch.ones(1, 4, dtype=torch.bool)), block(x))


def test_an_expert_without_a_row_has_a_gradient_of_zero() -> None:
    experts = random_experts()
    counts = torch.tensor([3, 0, 2, 0])
    experts(torch.ones(5, 16), counts).sum().backward()
    for parameter in experts.parameters():
        assert [bool(part.any()) for part in parameter.grad] == [True, False, True, False]


def test_experts_without_any_row_still_take_part_in_the_backward() -> None:
    experts = random_experts()
    rows = torch.empty(0, 16, requires_grad=True)
    out = experts(rows, torch.zeros(4, dtype=torch.int64))
    assert out.shape == (0, 16)
    out.sum().backward()
    assert rows.grad is not None
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in experts.parameters())


def test_the_grouped_kernel_gives_what_the_loop_gives() -> None:
    counts = torch.tensor([3, 0, 9, 4])
    rows = torch.randn(16, 16, generator=torch.Generator().manual_seed(5))
    matrices = [getattr(random_experts(), name) for name in NAMES]
    results = []
    for together in (False, True):
        inputs = [t.detach().clone().requires_grad_() for t in (rows, *matrices)]
        if together:
            out = grouped(inputs[0], counts, *inputs[1:])
        else:
            out = one_by_one(inputs[0], counts.tolist(), swiglu, *map(unbound, inputs[1:]))
        (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
        results.append([out, *(t.grad for t in inputs)])
    for looped, at_once in zip(*results, strict=True):
        torch.testing.assert_close(looped, at_once)


def test_the_block_is_a_weighted_sum_of_its_experts() -> None:
    block = random_block()
    x = torch.randn(1, 7, 16, generator=torch.Generator().manual_seed(6))
    weights, chosen = block.gate(x[0]).softmax(-1).topk(2, dim=-1)
    weights = weights / weights.sum(-1, keepdim=True)
    gate, up, down = (getattr(block.experts, name) for name in NAMES)
    for token in range(7):
        parts = [F.silu(gate[e] @ x[0, token]) * (up[e] @ x[0, token]) for e in chosen[token]]
        expected = sum(w * (down[e] @ part) for w, e, part in zip(weights[token], chosen[token], parts, strict=True))
        torch.testing.assert_close(block(x)[0, token], expected)


def test_experts_without_rows_get_zero_gradients() -> None:
    stack = torch.ones(4, 2, 3, requires_grad=True)
    ends = torch.tensor([2, 2, 5, 5], dtype=torch.int32)
    _GradientOfRows.apply(stack, ends).backward(torch.full((4, 2, 3), 7.0))
    assert stack.grad is not None
    assert stack.grad[:, 0, 0].tolist() == [7, 0, 7, 0]


def grouped_options(**other: Any) -> RouterOptions:
    sizes = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "num_experts": 6, "experts_per_token": 2}
    return RouterOptions(**{"kind": "glm4_moe", "expert_groups": 3, "chosen_groups": 1, **sizes, **other})


def test_experts_are_of_the_group_with_the_largest_two_scores_and_the_correction_takes_part() -> None:
    scores = torch.tensor([[0.9, 0.0, 0.5, 0.6, 0.3, 0.7]])
    assert chosen_experts(scores, grouped_options()).tolist() == [[3, 2]]
    assert chosen_experts(scores, grouped_options(expert_groups=1)).tolist() == [[0, 5]]
    correction = torch.tensor([0.0, 0.3, 0.0, 0.0, 0.0, 0.0])
    assert chosen_experts(scores, grouped_options(), correction).tolist() == [[0, 1]]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"expert_groups": 4}, "num_experts 6 are not expert_groups 4"),
        ({"expert_groups": 6}, "of two or more each"),
        ({"chosen_groups": 4}, "chosen_groups 4 of expert_groups 3"),
        ({"experts_per_token": 3}, "more than chosen_groups 1 have"),
        ({"router_bias_rate": 0.1, "lora": {}}, "router_bias_rate"),
    ],
)
def test_groups_that_do_not_divide_and_a_bias_beside_adapters_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        grouped_options(**wrong)
