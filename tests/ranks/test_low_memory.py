"""bf16 weights and 8-bit moments: the mesh changes neither the rounding nor the codes."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from comparison import assert_identical
from harness import run_in_turn, run_ranks
from test_experts import document as experts
from test_optimizers import train_on
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from training import STEPS, document, thinned, trained, whole

from raypp.job.job import OptimizerOptions
from raypp.kinds import OPTIMIZERS
from raypp.rank.optimizers.optimizer import begin_update, build_optimizer

PURE = {"precision": "bf16_pure"}
IN_8_BITS = {"optimizer": {"kind": "adamw", "lr": 3e-3, "state": "8bit"}}
WAYS: dict[str, dict[str, Any]] = {
    "bf16_pure": PURE,
    "8bit": IN_8_BITS,
    "both": PURE | IN_8_BITS,
    "both, sums in bf16": PURE | IN_8_BITS | {"reduce_dtype": "bf16"},
    "tied": PURE | IN_8_BITS,
}


def job(way: str, **settings: Any) -> dict[str, Any]:
    # An odd width, so that the shards of two ranks differ in size, and rows of more than one block.
    model = {"ffn_size": 301, "tie_embeddings": way == "tied"}
    return document(microbatches=4, model=model, train=WAYS[way], **settings)


def test_on_cpus_auto_has_the_bits_of_fp32() -> None:
    settings: dict[str, Any] = {"pp": 2, "schedule": "zbv", "pipeline": {"stages_per_rank": 2}, "microbatches": 4}
    fp32 = {"precision": "fp32", "compile": False}
    assert_identical(trained(document(**settings)), trained(document(**settings, train=fp32)))
    auto, own = ({"lora": {"rank": 4, "alpha": 8.0, "base": base}} for base in ("auto", "fp32"))
    assert_identical(trained(document(**settings, model=auto)), trained(document(**settings, model=own, train=fp32)))


@pytest.mark.parametrize("way", thinned(WAYS, ["tied"]))
def test_under_a_pipeline_every_weight_has_the_bits_of_one_process(way: str) -> None:
    assert_identical(trained(job(way, pp=2)), trained(job(way)))


def test_parameters_in_fp32_keep_updates_that_are_smaller_than_a_step_of_bf16() -> None:
    model = {"kind": "qwen3_5", "linear_key_head_dim": 8, "linear_value_head_dim": 6}
    train = PURE | {"optimizer": {"kind": "adamw", "lr": 1e-5}}

    def wide(steps: int, **mesh: Any) -> torch.Tensor:
        weights = trained(document(microbatches=4, model=model, train=train, **mesh), steps)["weights"]
        found = {name: value for name, value in sorted(weights.items()) if value.dtype == torch.float32}
        assert len(found) == 3 * 3 and {value.dtype for value in weights.values()} == {torch.float32, torch.bfloat16}
        return torch.cat([value.flatten() for value in found.values()])

    alone = wide(STEPS)
    assert_identical(*(trained(document(microbatches=4, model=model, train=train, pp=pp)) for pp in (2, 1)))
    for mesh in ({}, {"fsdp": 2}, {"fsdp": 2, "reduce_gradients": "each_microbatch"}):
        before, after = wide(1, **mesh), wide(STEPS, **mesh)
        assert (after != before).float().mean() > 0.9 and (after - before).abs().max() < 1e-4
        assert (after - alone).abs().mean() < 1e-6


MESHES = [{"fsdp": 2}, {"dp_replicate": 2}]
DATA_PARALLEL = [(way, axis) for way in WAYS if way != "tied" for axis in ("fsdp", "dp_replicate")]


@pytest.mark.parametrize(("way", "axis"), thinned(DATA_PARALLEL, [("both", "fsdp")]))
def test_on_data_parallel_meshes_the_loss_is_that_of_one_process(way: str, axis: str) -> None:
    ours, theirs = trained(job(way, **{axis: 2})), trained(job(way))
    assert ours["tokens"] == theirs["tokens"]
    # Sums in another order differ by 1e-7 in fp32 and 4e-3 in bf16, and each such difference may
    # move a code or a weight to the next one.
    assert ours["loss"][0] == pytest.approx(theirs["loss"][0], rel=1e-6)
    assert ours["loss"][1:] == pytest.approx(theirs["loss"][1:], rel=1e-3)
    near = 2e-2 if "sums" in way else 2e-3
    assert ours["grad_norm"][0] == pytest.approx(theirs["grad_norm"][0], rel=near)


@pytest.mark.parametrize("mesh", thinned(MESHES, MESHES[:1]), ids=str)
def test_bf16_gradients_of_the_first_step_have_nearly_all_the_bits_of_one_process(mesh: dict[str, int]) -> None:
    ours, theirs = (trained(job("bf16_pure", **on))["gradients"][0] for on in (mesh, {}))
    differing = sum(int((ours[name].float() != value.float()).sum()) for name, value in theirs.items())
    assert differing < 0.01 * sum(value.numel() for value in theirs.values())


# The update alone, with the same gradients on every mesh: nothing may differ.

SHAPES = {"matrix": (7, 301), "wide": (5, 600), "experts": (4, 6, 512), "vector": (45,)}
LAYOUTS: dict[str, list[Any]] = {"fsdp": [Shard(0)], "experts by columns": [Shard(-1)], "dp_replicate": [Replicate()]}


def updated(rank: int, world: int, port: int, kind: str, state: str, layout: str) -> dict[str, Any]:
    """Updates bf16 parameters three times; returns them and their state, unsharded."""
    if world > 1:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    module = torch.nn.Module()
    generator = torch.Generator().manual_seed(0)

    def spread(value: torch.Tensor) -> torch.Tensor:
        if world == 1:
            return value
        placements = LAYOUTS[layout]
        if layout == "experts by columns":
            placements = [Shard(value.ndim - 1) if value.shape[-1] == 512 else Replicate()]
        return distribute_tensor(value, init_device_mesh("cpu", (world,)), placements)

    for name, shape in SHAPES.items():
        drawn = torch.randn(shape, generator=generator).bfloat16()
        module.register_parameter(name, torch.nn.Parameter(spread(drawn)))
    options = OptimizerOptions(kind=kind, lr=3e-3, state=state)
    optimizer = build_optimizer([module], options, "bf16_pure", seed=5)
    for step in (1, 2, 3):
        for parameter in module.parameters():
            parameter.grad = spread(torch.randn(parameter.shape, generator=generator).bfloat16())
        begin_update(optimizer, [], 0.5, 3e-3, step)
        optimizer.step()
    found = {name: whole(parameter) for name, parameter in module.named_parameters()}
    for name, parameter in module.named_parameters():
        found |= {f"{name}/{key}": whole(value) for key, value in optimizer.state[parameter].items()}
    if world > 1:
        dist.destroy_process_group()
    return found


CASES = [("adamw", "fp32"), ("adamw", "8bit"), ("sgd", "fp32"), ("muon", "fp32")]


@pytest.fixture(scope="module")
def updates() -> dict[Any, list[dict[str, Any]]]:
    """What each rank of two has per optimizer and layout; of one process without the layout."""
    alone = [(*case, "") for case in CASES]
    spread = [(*case, layout) for case in CASES for layout in LAYOUTS]
    found = dict(zip(alone, run_in_turn(1, updated, alone), strict=True))
    return found | dict(zip(spread, run_in_turn(2, updated, spread), strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("kind", "state"), CASES)
def test_the_same_gradients_give_the_same_bits_on_every_mesh(
    updates: dict[Any, list[dict[str, Any]]], kind: str, state: str, layout: str
) -> None:
    assert {kind for kind, _ in CASES} == {one.name for one in OPTIMIZERS.usable() if one.bf16_weights}
    (expected,) = updates[kind, state, ""]
    for found in updates[kind, state, layout]:
        assert found.keys() == expected.keys()
        assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []


# Checkpoints.


@pytest.mark.parametrize(
    ("way", "mesh"),
    [
        pytest.param("bf16_pure", {"fsdp": 2}, marks=pytest.mark.slow),
        pytest.param("both", {"fsdp": 2}, marks=(pytest.mark.slow, pytest.mark.gate)),
        pytest.param("both", {"pp": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted(
    way: str, mesh: dict[str, int], tmp_path: Path
) -> None:
    lives = (("a", STEPS), ("b", STEPS - 1), ("b", 1))
    straight, _, resumed = run_in_turn(
        2, train_on, [(job(way, **mesh), str(tmp_path / name), steps) for name, steps in lives]
    )
    for ours, theirs in zip(resumed, straight, strict=True):
        for part in ("weights", "state"):
            assert ours[part].keys() == theirs[part].keys()
            assert [name for name, value in theirs[part].items() if not torch.equal(ours[part][name], value)] == []


MOVES = [({"fsdp": 2}, {}), ({"pp": 2}, {"fsdp": 2}), ({"pp": 2}, {})]


@pytest.mark.parametrize(("before", "after"), thinned(MOVES, MOVES[1:2]), ids=str)
def test_another_mesh_loads_codes_scales_and_weights_bit_for_bit(
    before: dict[str, int], after: dict[str, int], tmp_path: Path
) -> None:
    def on(mesh: dict[str, int], steps: int) -> dict[str, Any]:
        ranks = run_ranks(2 if mesh else 1, train_on, job("both", **mesh), str(tmp_path), steps)
        parts = ("loaded", "state", "weights")
        return {part: {k: v for rank in ranks for k, v in rank[part].items()} for part in parts}

    saved, found = on(before, STEPS - 1), on(after, 0)
    assert any(name.endswith("/exp_avg_sq_scale") for name in saved["state"])
    assert found["loaded"].keys() == saved["state"].keys()
    assert [name for name, value in saved["state"].items() if not torch.equal(found["loaded"][name], value)] == []
    assert [name for name, value in saved["weights"].items() if not torch.equal(found["weights"][name], value)] == []
    if "pp" in before and not after:
        assert all(
            torch.equal(value, trained(job("both"))["weights"][name]) for name, value in on({}, 1)["weights"].items()
        )


@pytest.mark.gate
def test_experts_over_ranks_are_saved_and_loaded_bit_for_bit(tmp_path: Path) -> None:
    """Two ranks share each expert, and two hold different ones: their state is cut in two dims."""
    train = document()["train"] | WAYS["both"]
    spread, alone = (experts(mesh=mesh, train=train) for mesh in ({"fsdp": 4, "ep": 2}, {}))
    ranks = run_ranks(4, train_on, spread, str(tmp_path), 2)
    assert all(torch.equal(value, ranks[1]["state"][name]) for name, value in ranks[0]["state"].items())
    (found,) = run_ranks(1, train_on, alone, str(tmp_path), 0)
    for part, name in (("state", "loaded"), ("weights", "weights")):
        assert found[name].keys() == ranks[0][part].keys()
        assert [key for key, value in ranks[0][part].items() if not torch.equal(found[name][key], value)] == []


@pytest.mark.parametrize("precision", thinned(["fp32", "bf16"], ["bf16"]))
def test_a_run_with_fp32_weights_goes_on_in_bf16_and_back(precision: str, tmp_path: Path) -> None:
    """Weights are rounded to nearest once; moments stay as they are."""
    wide = document(microbatches=4, train={"precision": precision})
    pure = document(microbatches=4, train=PURE)
    lives = [(wide, str(tmp_path), 1), (pure, str(tmp_path), 1), (wide, str(tmp_path), 0)]
    _, (pure,), (back,) = run_in_turn(1, train_on, lives)
    assert {value.dtype for value in pure["weights"].values()} == {torch.bfloat16}
    for name, value in pure["weights"].items():
        assert torch.equal(back["weights"][name], value.float())
        assert torch.equal(back["loaded"][f"{name}/exp_avg"], pure["state"][f"{name}/exp_avg"])
