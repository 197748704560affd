"""Ranks that compute each layer together add up what one process does, in every family."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from comparison import WIDE, assert_close, assert_identical, assert_same_sums, assert_tensors_close
from harness import run_ranks
from small_models import small_options
from torch import Tensor
from torch.distributed.tensor.debug import CommDebugMode
from training import document, numbers, seat_of, thinned, train_afresh, train_steps, trained

from raypp.job import precision
from raypp.job.known_families import FAMILIES
from raypp.job.load import parse_job
from raypp.stages.models.tensor_ranks import TensorRanks
from raypp.tools.parity import train_some_steps

Sections = dict[str, Any]
STEPS = 2
MESHES = {
    "tp 2": {"tp": 2},
    "tp 4": {"tp": 4},
    "tp 2, pp 2": {"tp": 2, "pp": 2},
    "tp 2, fsdp 2": {"tp": 2, "fsdp": 2},
    "tp 2, cp 2": {"tp": 2, "cp": 2},
}
SPREAD = {"tp": 2, "fsdp": 2, "ep": 2}
KINDS = list(FAMILIES)
QUICK = [("phi3", "tp 2, cp 2"), ("olmo2", "tp 2, pp 2"), ("starcoder2", "tp 2")]
GATE = [("gpt_oss", "tp 2, cp 2"), ("qwen3_5", "tp 4")]
IN_TURN = [(kind, list(MESHES)[(at + extra) % len(MESHES)]) for extra in (0, 2) for at, kind in enumerate(KINDS)]
PAIRS = list(dict.fromkeys([*QUICK, *GATE, *IN_TURN]))
"""Two meshes or more for each family."""
FOUR: dict[str, Sections] = {
    **{key: {"num_kv_heads": 4} for key in ("olmo2", "olmo3", "olmoe", "minimax_m2")},
    **{
        key: {"linear_num_key_heads": 4, "linear_num_value_heads": 4}
        for key in ("qwen3_next", "qwen3_5", "qwen3_5_moe")
    },
}
"""What tp 4 must divide, in families that cannot have the same head on several ranks."""


def job(kind: str, changes: Sections | None = None, **sections: Any) -> Sections:
    options = small_options(kind, num_layers=4).model_dump(mode="json", exclude_none=True)
    model = options | (FOUR.get(kind, {}) if sections.get("tp") == 4 else {}) | (changes or {})
    return {**document(microbatches=4, **sections), "model": model}


def assert_adds_up(kind: str, mesh: Sections, changes: Sections | None = None, **sections: Any) -> None:
    alone = job(kind, changes, **sections)
    spread = {**job(kind, changes, **mesh, **sections), "model": job(kind, changes, tp=mesh["tp"])["model"]}
    alone["model"] = spread["model"]
    if "base" in alone["model"].get("lora", {}):  # bytes, beside weights in fp64
        found, one = (trained(each, STEPS, dtype=torch.float64) for each in (spread, alone))
        assert_close(found, one, WIDE)
        assert found["weights"].keys() == one["weights"].keys()
        return
    assert_same_sums(numbers(spread, STEPS), numbers(alone, STEPS))


@pytest.mark.parametrize(("kind", "mesh"), thinned(PAIRS, QUICK, GATE))
def test_every_family_adds_up_what_one_process_does(kind: str, mesh: str) -> None:
    assert_adds_up(kind, MESHES[mesh])


EXPERTS = [kind for kind in KINDS if hasattr(small_options(kind), "num_experts")]


@pytest.mark.parametrize("kind", thinned(EXPERTS, [], ["qwen3_moe", "gemma4"]))
def test_experts_take_the_tokens_of_every_rank(kind: str) -> None:
    assert_adds_up(kind, SPREAD)


LARGER = {"hidden_size": 64, "ffn_size": 128}
V = {"schedule": "zbv", "pipeline": {"stages_per_rank": 2}}
FEATURES: dict[str, tuple[str, Sections, Sections, Sections]] = {
    "an odd vocabulary, tied": ("llama", MESHES["tp 4"], {"vocab_size": 99, "tie_embeddings": True}, {}),
    "tied over a pipeline": ("llama", MESHES["tp 2, pp 2"], {"tie_embeddings": True}, {}),
    "shared keys": (
        "gemma4", MESHES["tp 2"],
        {"layer_types": ["full_attention", "sliding_attention"] * 2, "num_kv_shared_layers": 2, "full_head_dim": 24,
         "per_layer_width": 8}, {},
    ),
    "ulysses": ("llama", {"tp": 2, "cp": 2, "cp_style": "ulysses"}, {}, {}),
    "sums in every backward": (
        "llama", {"tp": 2, "fsdp": 2, "reshard_after_forward": True, "reduce_gradients": "each_microbatch"}, {}, {},
    ),
    "replicas": ("gemma2", {"tp": 2, "dp_replicate": 2}, {}, {}),
    "replicas of shards": ("llama", {"tp": 2, "fsdp": 2, "dp_replicate": 2}, {}, {}),
    **{
        name: ("llama", MESHES["tp 2, pp 2"], {}, {"schedule": name, "pipeline": {"stages_per_rank": stages}})
        for name, stages in {
            "gpipe": 1, "interleaved_1f1b": 2, "looped_bfs": 2, "interleaved_zero_bubble": 2, "dualpipev": 2
        }.items()
    },
    "split backwards": ("glm", MESHES["tp 2, pp 2"], {"lora": {"rank": 4}}, V),
    "adapters with dropout": ("starcoder2", MESHES["tp 2"], {"lora": {"rank": 4, "dropout": 0.3}}, {}),
    "adapters on nf4": ("starcoder2", MESHES["tp 2, pp 2"], {**LARGER, "lora": {"rank": 4, "base": "nf4"}}, {}),
    "adapters on int8": ("qwen2", MESHES["tp 2, fsdp 2"], {"lora": {"rank": 4, "base": "int8"}}, {}),
    "selective": ("qwen3", MESHES["tp 2"], {}, {"train": {"activation_checkpointing": "selective"}}),
    "offload": ("qwen3", MESHES["tp 2"], {}, {"train": {"activation_checkpointing": "offload"}}),
    "compiled": ("phi3", MESHES["tp 2"], {}, {"train": {"compile": True}}),
    "muon": ("starcoder2", MESHES["tp 2, fsdp 2"], {}, {"train": {"optimizer": {"kind": "muon", "lr": 3e-3}}}),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", thinned(FEATURES, ["adapters with dropout"], ["adapters on nf4", "split backwards", "muon", "shared keys"])
)
def test_it_adds_up_with_other_features(name: str) -> None:
    kind, mesh, changes, sections = FEATURES[name]
    assert_adds_up(kind, mesh, changes, **sections)


def gradients(rank: int, world: int, port: int, compiled: bool, rows: int) -> list[Tensor]:
    """Returns what each exchange gives of `[rows, 6, 4]`, and the gradients of input and weight."""
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    ranks = TensorRanks(dist.group.WORLD, 8)  # type: ignore[arg-type]
    found: list[Any] = []
    for exchange in (ranks.gathered, ranks.spread, ranks.total):
        torch.manual_seed(rank)
        x, weight = torch.randn(rows, 6, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)

        def run(x: Tensor, weight: Tensor, exchange: Any = exchange) -> Tensor:
            return x.sum() + exchange(x @ weight)

        torch.compiler.reset()
        forward = torch.compile(run, backend="aot_eager", dynamic=True) if compiled else run
        out = forward(x, weight)
        out.square().sum().backward()
        found += [out.detach(), x.grad, weight.grad]
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("rows", [1, 2])
def test_compiled_exchanges_give_the_gradients_of_others(rows: int) -> None:
    """torch 2.11 makes zeros of gradients of tensors that a collective wrote."""
    for ours, theirs in zip(*(run_ranks(2, gradients, whether, rows) for whether in (True, False)), strict=True):
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


COMPILED: dict[str, tuple[str, Sections, Sections, str]] = {
    "norms over ranks": ("olmo2", MESHES["tp 2, pp 2"], {}, "none"),
    "joined, with adapters": ("phi3", MESHES["tp 2, pp 2"], {"lora": {"rank": 4}}, "full"),
    "a bias on one rank": ("starcoder2", {"tp": 2, "fsdp": 2}, {"tie_embeddings": False}, "selective"),
    "columns of a whole matrix": ("qwen2", MESHES["tp 2"], {**LARGER, "lora": {"rank": 4, "base": "nf4"}}, "none"),
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", thinned(COMPILED, [], ["norms over ranks"]))
def test_split_backwards_of_compiled_blocks_have_the_bits_of_whole_ones(name: str) -> None:
    kind, mesh, changes, extent = COMPILED[name]
    train = {"compile": True, "activation_checkpointing": extent}
    split, whole = (
        trained(job(kind, changes, **mesh, train=train, **how), STEPS, train=train_afresh)
        for how in (V, {"schedule": "1f1b"})
    )
    assert_identical(split, whole)


def trained_wide(*arguments: Any, **options: Any) -> dict[str, Any]:
    """Trains with fp8 in a dtype of the test beside it, instead of bf16. Sums of what is rounded to
    fp8 are then exact, so that a difference of any code or scale shows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(precision.PRECISIONS, "fp8", replace(precision.PRECISIONS["fp8"], compute=precision.FP32))
        precision.precision_of.cache_clear()
        try:
            return train_steps(*arguments, **options)
        finally:
            precision.precision_of.cache_clear()


FREED = {"tp": 2, "fsdp": 2, "reshard_after_forward": True}
BASE: Sections = {"lora": {"rank": 4, "base": "fp8"}}
FP8: dict[str, tuple[str, Sections, Sections, Sections]] = {
    "cut": ("qwen3", MESHES["tp 2"], {}, {}),
    "split backwards": ("olmo2", MESHES["tp 2, pp 2"], {}, V),
    "joined, heads on two ranks": ("phi3", MESHES["tp 4"], {}, {}),
    "heads on two ranks, freed": ("starcoder2", {**FREED, "tp": 4}, {}, {}),
    "freed": ("qwen3", FREED, {}, {"train": {"activation_checkpointing": "full"}}),
    "compiled": ("qwen3", MESHES["tp 2"], {}, {"train": {"compile": True}}),
    "latent": (
        "deepseek_v3", SPREAD, {"expert_ffn_size": 32, "q_lora_rank": 32}, {"train": {"fp8": {"experts": True}}}
    ),
    "delta rule": ("qwen3_5", MESHES["tp 2, cp 2"], {"linear_num_value_heads": 16, "linear_num_key_heads": 16}, {}),
    "adapters on fp8": ("starcoder2", MESHES["tp 4"], BASE, {"train": {"precision": "fp32"}}),
    "latent, on fp8": (
        "deepseek_v3", MESHES["tp 2, pp 2"], {**BASE, "expert_ffn_size": 32}, {"train": {"precision": "fp32"}}
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", thinned(FP8, ["cut"], ["split backwards", "adapters on fp8", "latent"]))
def test_products_in_fp8_have_the_codes_and_scales_of_one_process(name: str) -> None:
    kind, mesh, changes, sections = FP8[name]
    sections = {**sections, "train": {"precision": "fp8", **sections.get("train", {})}}
    wide = {"hidden_size": 64, "ffn_size": 64, **changes}
    found, one = (
        trained(job(kind, wide, **each, **sections), STEPS, dtype=torch.float64, train=trained_wide)
        for each in (mesh, {})
    )
    assert_close(found, one, WIDE)
    if "lora" not in changes:
        assert_tensors_close(found["weights"], one["weights"], WIDE)


def collectives(rank: int, world: int, port: int, layers: int, extent: str) -> dict[str, int]:
    """Returns how often ranks gather and spread in a forward and backward of one microbatch."""
    parsed = parse_job(
        document(tp=2, layers=layers, microbatches=1, train={"activation_checkpointing": extent, "steps": 1})
    )
    seen: dict[str, int] = {}

    def count(step: int, runner: Any) -> None:
        run = runner.built.runtime.run

        def counted(*arguments: Any, **options: Any) -> Any:
            with CommDebugMode() as mode:
                out = run(*arguments, **options)
            for operator, times in mode.get_comm_counts().items():
                seen[str(operator)] = times
            return out

        runner.built.runtime.run = counted

    train_some_steps(parsed, seat_of(rank, world, port, parsed), 1, lambda name, tensors: None, before=count)
    return seen


@pytest.mark.parametrize(
    ("extent", "each"),
    thinned({"none": (6, 4), "selective": (6, 4), "full": (6, 5)}.items(), [("none", (6, 4))], [("selective", (6, 4))]),
)
def test_a_layer_gathers_and_spreads_twice_each_way(extent: str, each: tuple[int, int]) -> None:
    """A recomputation gathers again, and ends before the last sum."""
    few, more = (run_ranks(2, collectives, layers, extent)[0] for layers in (1, 3))
    of_layer = {name: (more[name] - few[name]) / 2 for name in more if more[name] != few[name]}
    assert of_layer == {"c10d._allgather_base_": each[0], "c10d._reduce_scatter_base_": each[1]}


def test_the_norm_counts_what_all_ranks_hold_once() -> None:
    """A gain that every rank holds would count twice without any other sign."""
    found, alone = (trained(job("qwen3", **mesh), 1, dtype=torch.float64) for mesh in ({"tp": 2}, {}))
    assert found["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-12)
