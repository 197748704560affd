"""Adapters on frozen weights: no mesh, cut or schedule changes the numbers, nor the frozen weights.

The reference is one process.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from comparison import assert_identical, assert_same_sums
from hf_folder import write_hf_folder
from safetensors.numpy import load_file
from test_recut_of_runs import run_all
from training import document as small
from training import numbers, thinned, trained

from raypp.job.models import DecoderOptions, LoraOptions
from raypp.state.checkpoint.commit import read_commit
from raypp.state.checkpoint.saved_tensors import SavedTensors
from raypp.state.hf.from_hf import hf_options
from raypp.storage.directory import DirectoryStore
from raypp.tools.export.export_model import export_hf

LAYERS = 4


def document(
    targets: list[str] | None = None, *, kind: str = "llama", mesh: dict[str, Any] | None = None, **sections: Any
) -> dict[str, Any]:
    mesh, pipeline = mesh or {}, sections.pop("pipeline", {})
    experts = {"num_experts": 6, "experts_per_token": 2, "expert_ffn_size": 24, "aux_loss_weight": 0.02}
    model = {
        "kind": kind, "tie_embeddings": True, **(experts if kind == "qwen3_moe" else {}),
        "lora": {"rank": 4, "alpha": 64, "base": "fp32", "targets": targets or ["all-linear"]},
        **sections.pop("model", {}),
    }  # fmt: skip
    pipeline = {**_even_cut(mesh.get("pp", 1) * pipeline.get("stages_per_rank", 1)), **pipeline}
    train = {"clip_norm": 0.01, "optimizer": {"kind": "adamw", "lr": 1e-2}, **sections.pop("train", {})}
    return small(name="lora", layers=LAYERS, model=model, pipeline=pipeline, train=train, **mesh, **sections)


def _even_cut(stages: int) -> dict[str, Any]:
    """Returns the cut into equal stages: the balanced one would give them other layers to train."""
    return {"layers_per_stage": [LAYERS // stages] * stages} if stages > 1 else {}


UPPER = ["layers.2.self_attn.q_proj", "layers.3.mlp.down_proj"]
"""With two stages, the lower one trains nothing."""
APART = ["layers.1.mlp.up_proj", "layers.3.self_attn.o_proj"]
"""With four stages, the lowest and the third train nothing."""
BF16 = {"train": {"precision": "bf16"}, "model": {"lora": {"rank": 4, "base": "bf16"}}}


def beside(*also: str, tied: bool) -> dict[str, Any]:
    lora = {"rank": 4, "alpha": 64, "base": "fp32", "targets": ["layers.2.self_attn.q_proj"], "also_train": also}
    return {"model": {"tie_embeddings": tied, "lora": lora}}


TIED, HEAD = beside("embed_tokens", "norms", tied=True), beside("lm_head", tied=False)
MODELS = {
    "all": document(),
    "upper": document(UPPER),
    "apart": document(APART),
    "experts": document(kind="qwen3_moe"),
    "up_proj of experts": document(["layers.1.mlp.experts.up_proj"], kind="qwen3_moe"),
    "bf16": document(**BF16),
    "tied": document(**TIED),
    "head": document(**HEAD),
}


def pipeline(schedule: str, targets: list[str] | None = None, stages: int = 1, **other: Any) -> dict[str, Any]:
    return document(targets, schedule=schedule, mesh={"pp": 2}, pipeline={"stages_per_rank": stages}, **other)


PIPELINES = {
    ("all", "1f1b"): pipeline("1f1b"),
    ("all", "zbv"): pipeline("zbv", stages=2),
    ("all", "recomputed"): pipeline("1f1b", train={"activation_checkpointing": "full"}),
    ("upper", "1f1b"): pipeline("1f1b", UPPER),
    ("apart", "interleaved_1f1b"): pipeline("interleaved_1f1b", APART, stages=2),
    ("apart", "interleaved_zero_bubble"): pipeline("interleaved_zero_bubble", APART, stages=2),
    ("apart", "dualpipev"): pipeline("dualpipev", APART, stages=2),
    ("experts", "1f1b"): pipeline("1f1b", kind="qwen3_moe"),
    ("experts", "interleaved_zero_bubble"): pipeline("interleaved_zero_bubble", stages=2, kind="qwen3_moe"),
    ("up_proj of experts", "1f1b"): pipeline("1f1b", ["layers.1.mlp.experts.up_proj"], kind="qwen3_moe"),
    ("bf16", "1f1b"): pipeline("1f1b", **BF16),
    ("tied", "1f1b"): pipeline("1f1b", **TIED),
    ("head", "interleaved_zero_bubble"): pipeline("interleaved_zero_bubble", stages=2, **HEAD),
}


@pytest.mark.parametrize(
    ("model", "way"),
    thinned(
        PIPELINES,
        [("upper", "1f1b"), ("apart", "dualpipev"), ("tied", "1f1b")],
        [("experts", "interleaved_zero_bubble"), ("head", "interleaved_zero_bubble")],
    ),
)
def test_a_pipeline_of_adapters_gives_the_bits_of_one_process(model: str, way: str) -> None:
    found, reference = trained(PIPELINES[model, way]), trained(MODELS[model])
    assert_identical(found, reference)
    words = {"tied": ("norm", "embed_tokens"), "head": ("lm_head",)}.get(model, ())
    whole = {name for name in reference["weights"] if any(word in name for word in words)}
    assert set(found["gradients"][0]) == whole | {name for name in reference["weights"] if ".lora_" in name}
    assert all(found["gradients"][0][name].any() for name in whole)
    moved = [name for name in found["gradients"][0] if ".lora_B." in name]
    assert moved and all(found["weights"][name].any() for name in moved)


SUMS = {
    ("upper", "fsdp"): document(UPPER, mesh={"fsdp": 2}),
    ("all", "reshard"): document(mesh={"fsdp": 2, "reshard_after_forward": True}),
    ("all", "dp_replicate"): document(mesh={"dp_replicate": 2}),
    ("all", "cp"): document(mesh={"cp": 2}),
    ("experts", "ep"): document(kind="qwen3_moe", mesh={"fsdp": 2, "ep": 2}),
    ("upper", "pp and fsdp"): document(UPPER, mesh={"pp": 2, "fsdp": 2}),
    ("all", "pp and fsdp, split"): document(
        mesh={"pp": 2, "fsdp": 2}, schedule="interleaved_zero_bubble", pipeline={"stages_per_rank": 2}
    ),
    ("tied", "pp and fsdp"): document(mesh={"pp": 2, "fsdp": 2}, **TIED),
    ("experts", "fsdp and ep"): document(kind="qwen3_moe", mesh={"fsdp": 4, "ep": 2}),
}


@pytest.mark.parametrize(("model", "way"), thinned(SUMS, [], [("all", "cp"), ("all", "pp and fsdp, split")]))
def test_ranks_that_share_a_step_add_the_same_gradients(model: str, way: str) -> None:
    assert_same_sums(numbers(SUMS[model, way]), numbers(MODELS[model]))


def test_frozen_weights_stay_as_they_were_drawn() -> None:
    """Two steps more or fewer change adapters only: frozen weights have the bits of a full job."""
    weights = trained(MODELS["all"])["weights"]
    full = trained({**document(model={"lora": None}), "train": {"optimizer": {"lr": 0.0}, "seed": 3}}, 1)
    assert set(full["weights"]) < set(weights)
    assert all(torch.equal(weights[name], value) for name, value in full["weights"].items())


def test_a_run_begins_with_the_named_base_saves_what_is_trained_and_refuses_another_base(tmp_path: Path) -> None:
    sizes = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "ffn_size": 48, "vocab_size": 96}
    frozen = write_hf_folder(tmp_path / "hf", **sizes)
    lora = LoraOptions(rank=4, base="fp32", also_train=("embed_tokens", "norms"))
    model = hf_options(DecoderOptions(from_hf=str(tmp_path / "hf"), lora=lora)).model_dump(mode="json")
    assert model["lora"]["base_id"] is not None

    def job(steps: int, **mesh: int) -> dict[str, Any]:
        own_cut = {"layers_per_stage": None}
        found = document(
            mesh=mesh, pipeline=own_cut, train={"steps": steps, "lr_schedule": {"kind": "constant", "warmup_steps": 1}}
        )
        checkpoint = {"url": str(tmp_path / "store"), "every_steps": 0, "memory_tier": False}
        return {**found, "model": model, "checkpoint": checkpoint}

    for step, mesh in ((1, {"pp": 2}), (2, {"fsdp": 2})):
        (results,) = run_all([(job(step, **mesh), step)])
        assert results[0]["kinds"].count("loaded_from_hf") == 3 - step and results[0]["committed"] == step
        assert ("resumed" in results[0]["kinds"]) == (step == 2)
    store = DirectoryStore(tmp_path / "store")
    commit = read_commit(store, "lora", 2)
    saved = SavedTensors(store, commit)
    whole = {name for name in frozen if "norm" in name or "embed" in name}
    assert {name for name in saved.infos if not name.startswith("optim/") and ".lora_" not in name} == whole
    export_hf(store, commit, DirectoryStore(tmp_path / "merged"))
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert merged.keys() == frozen.keys()
    same = {name for name, value in frozen.items() if (merged[name] == value).all()}
    assert same == {"lm_head.weight"}
    moved = [abs(merged[name] - frozen[name]).max() for name in whole]
    assert all(0 < far < 0.03 for far in moved), "two steps from the base's own values"

    write_hf_folder(tmp_path / "hf", 1, **sizes)
    with pytest.raises(AssertionError, match="holds other weights"):
        run_all([(job(3), 3)])
