"""When samples are taken, and which jobs cannot take any."""

from typing import Any

import pytest

from raypp.errors import JobError
from raypp.job.checks import check_spec, check_training
from raypp.job.job import Job
from raypp.job.load import parse_job

SAMPLE = {"prompts": ["In the beginning"], "every_steps": 3, "max_new_tokens": 8}
SIZES = {"num_layers": 4, "hidden_size": 32, "num_heads": 4, "ffn_size": 48, "vocab_size": 257}


def job(**sections: dict[str, Any]) -> Job:
    data = {"path": __file__, "seq_len": 32, **sections.pop("data", {})}
    train = {"steps": 7, "sample": SAMPLE, **sections.pop("train", {})}
    return parse_job(
        {"name": "a", "model": {**SIZES, **sections.pop("model", {})}, "data": data, "train": train, **sections}
    )


@pytest.mark.parametrize("mesh", [{"pp": 2}, {"fsdp": 2}, {"pp": 2, "dp_replicate": 2}])
def test_meshes_that_sample(mesh: dict[str, int]) -> None:
    assert not check_spec(job(mesh=mesh))


def test_runs_on_tokens_sample_with_the_tokenizer_that_encoded_them() -> None:
    found = check_spec(job(data={"kind": "tokens", "path": "/nowhere.npy", "tokenizer": "bytes"}))
    assert [problem.key for problem in found] == ["data.path"]


@pytest.mark.parametrize(
    ("sections", "reported"),
    [
        ({"mesh": {"cp": 2}}, "mesh.cp 2 cuts rows over ranks"),
        ({"train": {"compile": True}}, "train.compile compiles blocks for training only"),
        ({"data": {"kind": "synthetic", "path": None}}, "data of kind synthetic have no tokenizer"),
        (
            {"mesh": {"fsdp": 2, "ep": 2}, "model": {"kind": "qwen3_moe", "num_experts": 4}},
            "mesh.ep 2 spreads experts over ranks",
        ),
    ],
)
def test_what_cannot_sample_is_refused_by_name(sections: dict[str, Any], reported: str) -> None:
    found = [problem for problem in check_spec(job(**sections)) if problem.key == "train.sample"]
    assert [reported in problem.fault for problem in found] == [True]
    assert ("raypp generate" in found[0].fix) == ("tokenizer" not in reported), "it needs a tokenizer, too"
    assert check_training(job(**sections)) == found, "plan proposes no such job"


def test_prompts_must_fit_with_their_answers() -> None:
    (problem,) = check_spec(job(train={"sample": {**SAMPLE, "prompts": ["ok", "x" * 25]}}))
    assert problem.key == "train.sample.prompts[1]"
    assert problem.fault == "has 25 tokens: with 8 new ones it exceeds data.seq_len, 32"


@pytest.mark.parametrize(
    "wrong", [{"prompts": []}, {"prompts": [""]}, {"prompts": ["a"], "every_steps": 0}, {"prompts": ["a"] * 17}]
)
def test_wrong_values_are_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(JobError, match=r"train\.sample"):
        job(train={"sample": {**SAMPLE, **wrong}})
