"""SGD and Muon on one process: the update of a step, and the parameters it applies to."""

from typing import Any

import pytest
import torch

from raypp.job.families.gpt_oss import GptOssOptions
from raypp.job.job import OptimizerOptions
from raypp.job.models import DecoderOptions
from raypp.rank.optimizers.adamw import FusedAdamW
from raypp.rank.optimizers.bf16_weights import Bf16Weights
from raypp.rank.optimizers.muon import Muon, orthogonalised
from raypp.rank.optimizers.optimizer import begin_update, build_optimizer
from raypp.stages.models.stage import build_stage

MODEL = DecoderOptions(num_layers=2, hidden_size=16, num_heads=2, ffn_size=24, vocab_size=32)


def stage() -> torch.nn.Module:
    module = build_stage(MODEL, range(2), first=True, last=True).to_empty(device="cpu")
    for index, parameter in enumerate(module.parameters()):
        torch.manual_seed(index)
        torch.nn.init.normal_(parameter)
        parameter.grad = torch.randn_like(parameter)
    return module


@pytest.mark.parametrize("shape", [(24, 16), (16, 24), (16, 16), (3, 24, 16)])
def test_an_orthogonalised_matrix_has_singular_values_near_one(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalised(torch.randn(shape), torch.float32))
    assert values.min() > 0.3 and values.max() < 1.25


def test_orthogonalising_does_not_mind_the_scale_and_gives_zero_for_zero() -> None:
    torch.manual_seed(0)
    matrix = torch.randn(8, 12)
    torch.testing.assert_close(orthogonalised(1e-4 * matrix, torch.float32), orthogonalised(matrix, torch.float32))
    assert not orthogonalised(torch.zeros(4, 6), torch.float32).any()


def test_experts_are_orthogonalised_one_by_one() -> None:
    torch.manual_seed(0)
    experts = torch.randn(3, 8, 12)
    together = orthogonalised(experts, torch.float32)
    torch.testing.assert_close(together, torch.stack([orthogonalised(one, torch.float32) for one in experts]))


def test_muon_takes_the_matrices_of_the_layers_and_leaves_the_rest_to_adamw() -> None:
    module = stage()
    optimizer = build_optimizer([module], OptimizerOptions(kind="muon", lr=0.01))
    optimizer.step()
    for name, parameter in module.named_parameters():
        hidden = name.startswith("model.layers.") and parameter.ndim > 1
        assert set(optimizer.state[parameter]) == ({"momentum_buffer"} if hidden else {"step", "exp_avg", "exp_avg_sq"})


def test_what_muon_leaves_to_adamw_gets_adamws_bits() -> None:
    ours, theirs = stage(), stage()
    build_optimizer([ours], OptimizerOptions(kind="muon", lr=0.01)).step()
    build_optimizer([theirs], OptimizerOptions(kind="adamw", lr=0.01)).step()
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        if not name.startswith("model.layers.") or a.ndim == 1:
            assert torch.equal(a, b), name


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon of its own to compare with")
def test_muon_agrees_with_torchs_own_in_bf16() -> None:
    ours, theirs = (torch.nn.Parameter(torch.eye(24, 16)) for _ in range(2))
    settings: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}
    own = Muon(
        [{"params": [ours], "weight_decay": settings.pop("weight_decay")}],
        [],
        torch.optim.AdamW,
        dtype=torch.bfloat16,
        weights=Bf16Weights([]),
        **settings,
    )
    reference = torch.optim.Muon([theirs], weight_decay=0.1, adjust_lr_fn="match_rms_adamw", **settings)
    for step in range(3):
        torch.manual_seed(step)
        ours.grad = torch.randn(24, 16)
        theirs.grad = ours.grad.clone()
        own.step()
        reference.step()
    # bf16 keeps 8 bits; the two implementations multiply in a different order.
    torch.testing.assert_close(ours, theirs, rtol=0, atol=3 * 0.1 * 0.2 * 24**0.5 * 2**-6)


def test_the_learning_rate_of_every_group_is_set_at_once() -> None:
    optimizer = build_optimizer([stage()], OptimizerOptions(kind="muon"))
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]
    optimizer.step()
    after = [p for group in optimizer.param_groups for p in group["params"]]
    assert len(after) == 21 and all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("kind", ["adamw", "8bit", "sgd", "muon"])
def test_a_group_has_the_update_of_an_optimizer_with_its_rate_and_decay(kind: str) -> None:
    def updated(lr: float, **options: Any) -> dict[str, torch.Tensor]:
        module = stage()
        own = {"kind": "adamw", "state": "8bit"} if kind == "8bit" else {"kind": kind}
        optimizer = build_optimizer([module], OptimizerOptions(**own, lr=lr, **options))
        begin_update(optimizer, [], 1.0, lr, 1)
        optimizer.step()
        return {name: parameter.detach() for name, parameter in module.named_parameters()}

    slow_ones = {"match": r"layers\.1\..*proj|lm_head", "lr_factor": 0.25, "weight_decay": 0.5}
    found = updated(0.01, groups=[slow_ones, {"match": "norm", "lr_factor": 0}])
    plain, slow, still = updated(0.01), updated(0.0025, weight_decay=0.5), updated(0.0)
    for name, value in found.items():
        reference = still if "norm" in name else slow if "layers.1." in name or "lm_head" in name else plain
        assert torch.equal(value, reference[name]), name
    assert not torch.equal(plain["lm_head.weight"], slow["lm_head.weight"])


def experts() -> torch.nn.Module:
    """A layer of gpt-oss, whose experts' biases are `[E, n]`, with gradients of zero."""
    sizes = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "vocab_size": 32, "sliding_window": 4}
    options = GptOssOptions(kind="gpt_oss", num_experts=2, experts_per_token=1, expert_ffn_size=8, **sizes)
    module = build_stage(options, range(1), first=True, last=True).to_empty(device="cpu")
    for parameter in module.parameters():
        torch.nn.init.ones_(parameter)
        parameter.grad = torch.zeros_like(parameter)
    return module


@pytest.mark.parametrize("kind", ["adamw", "sgd", "muon"])
def test_biases_of_experts_do_not_decay(kind: str) -> None:
    module = experts()
    build_optimizer([module], OptimizerOptions(kind=kind, lr=0.1, weight_decay=0.5)).step()
    stayed = {name for name, parameter in module.named_parameters() if bool((parameter == 1).all())}
    assert "model.layers.0.mlp.experts.fused_down_proj_bias" in stayed
    assert stayed == {name for name, p in module.named_parameters() if name.endswith("bias") or p.ndim == 1}


def test_sgd_decays_weights_outside_the_momentum() -> None:
    weight = torch.nn.Parameter(torch.full((2, 2), 10.0))
    module = torch.nn.Module()
    module.weight = weight
    optimizer = build_optimizer([module], OptimizerOptions(kind="sgd", lr=0.1, momentum=0.5, weight_decay=0.2))
    expected, velocity = 10.0, 0.0
    for gradient in (1.0, -2.0, 4.0):
        weight.grad = torch.full((2, 2), gradient)
        optimizer.step()
        velocity = 0.5 * velocity + gradient
        expected = expected * (1 - 0.1 * 0.2) - 0.1 * velocity
    torch.testing.assert_close(weight.detach(), torch.full((2, 2), expected))


def test_sgd_without_momentum_keeps_no_state_worth_saving() -> None:
    module = stage()
    optimizer = build_optimizer([module], OptimizerOptions(kind="sgd", momentum=0.0))
    optimizer.step()
    assert all(value is None for state in optimizer.state.values() for value in state.values())


def test_adamw_gives_the_bits_and_the_state_of_torchs_own() -> None:
    ours, theirs = stage(), stage()
    options = OptimizerOptions(kind="adamw", lr=1e-2, betas=(0.8, 0.9), weight_decay=0.2)
    own = build_optimizer([ours], options)
    named = list(theirs.named_parameters())
    torchs = torch.optim.AdamW(
        [
            {"params": [p for _, p in named if p.ndim > 1], "weight_decay": 0.2},
            {"params": [p for _, p in named if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=1e-2, betas=(0.8, 0.9), eps=options.eps, fused=True,
    )  # fmt: skip
    for _ in range(3):
        own.step()
        torchs.step()
    for (name, mine), (_, other) in zip(ours.named_parameters(), named, strict=True):
        assert torch.equal(mine, other), name
        assert own.state[mine].keys() == torchs.state[other].keys()
        assert all(torch.equal(value, torchs.state[other][key]) for key, value in own.state[mine].items())


def updated(prepares: bool) -> list[torch.Tensor]:
    """Returns weights after three steps, of which the second is skipped after it was prepared."""
    torch.manual_seed(0)
    module = torch.nn.Linear(3, 5)
    optimizer = build_optimizer([module], OptimizerOptions(kind="adamw", lr=0.1))
    assert isinstance(optimizer, FusedAdamW)
    for step in range(3):
        for weight in module.parameters():
            weight.grad = torch.randn_like(weight)
        if prepares:
            optimizer.prepare_fused()
        if step != 1:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return [weight.detach() for weight in module.parameters()]


def test_an_update_that_is_prepared_has_the_same_bits_and_a_skipped_one_leaves_nothing_behind() -> None:
    assert all(map(torch.equal, updated(True), updated(False)))
