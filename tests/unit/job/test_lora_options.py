"""`model.lora`: which matrices get adapters, and what is refused."""

from typing import Any

import pytest

from raypp.errors import JobError
from raypp.job.checks import check_spec
from raypp.job.load import job_document, parse_job
from raypp.job.lora import layer_adapters, model_adapters, trains
from raypp.planning.check import check_plan


def found(lora: dict[str, Any], model: dict[str, Any] | None = None, **sections: Any) -> dict[str, str]:
    document = {"name": "a", "data": {"kind": "synthetic"}, "model": {"lora": lora, **(model or {})}, **sections}
    problems = check_spec(parse_job(document))
    assert all(problem.fix for problem in problems)
    return {problem.key: f"{problem.fault} | {problem.fix}" for problem in problems}


BF16 = {"train": {"precision": "bf16"}}


@pytest.mark.parametrize(("precision", "base"), [("fp32", "fp32"), ("bf16", "bf16"), ("bf16_pure", "bf16")])
def test_the_frozen_weights_are_by_default_in_what_training_computes_in(precision: str, base: str) -> None:
    for lora in ({"rank": 8}, {"rank": 8, "targets": "all-linear", "base": "auto"}):
        assert found(lora, train={"precision": precision}) == {}
        job = parse_job({"name": "a", "model": {"lora": lora}, "train": {"precision": precision}})
        assert job.model.lora is not None and job.model.lora.base == base
        assert job.model.lora.targets == ("all-linear",)
        assert parse_job(job_document(job)) == job


def test_a_base_of_bf16_needs_products_in_bf16() -> None:
    assert found({"base": "fp32"}) == found({"base": "bf16"}, **BF16) == {}
    assert found({"base": "bf16"}) == {
        "model.lora.base": "bf16 weights cannot be used with train.precision: fp32 | "
        "use train.precision: bf16, or base: fp32"
    }


def test_dropout_is_for_all_matrices_but_those_of_experts() -> None:
    assert found({"dropout": 0.1}, **BF16) == {}
    assert found({"dropout": 0.1, "targets": ["q_proj"]}, {"kind": "mixtral"}, **BF16) == {}


def test_bf16_pure_and_offload_work_with_adapters_unless_the_base_is_fp32() -> None:
    pure = {"train": {"precision": "bf16_pure", "optimizer": {"offload": True}}}
    assert found({}, **pure) == found({"base": "int8"}, **pure) == {}
    assert "all weights in bf16" in found({"base": "fp32"}, **pure)["model.lora.base"]


def test_a_target_that_matches_nothing_is_refused_with_what_there_is() -> None:
    reported = found({"targets": ["q_proj", "v_porj"]}, **BF16)["model.lora.targets"]
    assert reported.startswith(
        "'v_porj' matches no matrix of llama's layers; there are: q_proj, k_proj, v_proj, o_proj,"
    )
    assert reported.endswith("did you mean v_proj?")
    assert "model.lora.targets" in found({"targets": ["lm_head"]}, **BF16)
    assert "nothing would be trained" in found({"targets": []}, **BF16)["model.lora.targets"]
    assert "model.lora.targets" in found({"targets": ["roj"]}, **BF16), "only whole words match"
    assert "w1, w3, w2" in found({"targets": ["up_proj"]}, {"kind": "mixtral"}, **BF16)["model.lora.targets"]
    assert "model.lora.targets" in found({"targets": ["gate"]}, {"kind": "mixtral"}, **BF16), "routers have none"


@pytest.mark.parametrize(
    ("lora", "model", "key", "reported"),
    [
        (
            {"dropout": 0.1},
            {"kind": "mixtral"},
            "model.lora.dropout",
            "0.1 is not available for matrices of experts; targets match w1, w2, w3 | use 0, or targets without them",
        ),
        ({"base": "nf4"}, {"ffn_size": 688}, "model.lora.base", "mlp.down_proj.weight is 256 × 688 | use int8"),
        ({}, {"kind": "json:loads"}, "model.lora", "is your own code"),
    ],
)
def test_what_cannot_work_is_refused(lora: dict[str, Any], model: dict[str, Any], key: str, reported: str) -> None:
    assert reported in found(lora, model, **BF16)[key]


def test_parts_that_train_beside_adapters_are_named_and_the_optimizer_groups_know_them() -> None:
    with pytest.raises(
        JobError, match=r"also_train\[1\]: must be embed_tokens, lm_head or norms, is 'head'\n.*lm_head\?"
    ):
        found({"also_train": ["embed_tokens", "head"]})
    with pytest.raises(JobError, match=r"did you mean model\.lora\.also_train\?"):
        found({}, {"also_train": ["norms"]})
    groups = {"train": {"precision": "bf16", "optimizer": {"groups": [{"match": "embed|lm_head", "lr_factor": 0.1}]}}}
    key = "train.optimizer.groups[0].match"
    assert found({"also_train": "lm_head"}, {"tie_embeddings": True}, **groups) == {}, "tied: it is the embedding"
    assert found({"also_train": ["norms"]}, **groups)[key].startswith("'embed|lm_head' matches no trained parameter")


def test_targets_are_ends_of_names() -> None:
    def adapted(kind: str, *targets: str) -> list[str]:
        return list(model_adapters(parse_job(document(kind, targets)).model))

    def document(kind: str, targets: tuple[str, ...]) -> dict[str, Any]:
        return {"name": "a", "model": {"kind": kind, "num_layers": 2, "lora": {"targets": targets}}}

    assert adapted("llama", "mlp.up_proj") == ["model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj"]
    assert adapted("llama", "layers.1.self_attn.q_proj") == ["model.layers.1.self_attn.q_proj"]
    assert len(adapted("llama", "all-linear")) == 14
    assert [name.rpartition(".")[2] for name in adapted("qwen3_moe", "all-linear")[:7]] == [
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    ]  # fmt: skip
    model = parse_job(document("llama", ("layers.1.self_attn.q_proj",))).model
    assert (trains(model, range(1)), trains(model, range(1, 2))) == (False, True)
    assert [a.parameters for a in layer_adapters(model, 1)] == [16 * (256 + 256)]


def test_ranks_that_share_experts_must_divide_their_adapters() -> None:
    def problems(rank: int, width: int) -> list[str]:
        model = {"kind": "qwen3_moe", "hidden_size": 64, "expert_ffn_size": width, "lora": {"rank": rank}}
        mesh = {"fsdp": 4, "ep": 2}
        return [p.key for p in check_plan(parse_job({"name": "a", "model": model, "mesh": mesh, **BF16}))]

    assert problems(4, 33) == problems(3, 32) == []
    assert problems(3, 33) == ["mesh.ep"]
