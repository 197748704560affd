import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from raypp.errors import CheckpointError
from raypp.job.job import Job
from raypp.state.checkpoint.compatibility import as_recorded, check_resume, rate_jump
from raypp.state.checkpoint.run_spec import read_spec, write_spec
from raypp.storage import AlreadyExists
from raypp.storage.directory import DirectoryStore


def job(**sections: Any) -> Job:
    return Job.model_validate({"name": "kjv", **sections})


def written(value: Job) -> dict[str, Any]:
    return json.loads(json.dumps(value.model_dump(mode="json")))


OLD = written(job(mesh={"pp": 2, "fsdp": 2}, pipeline={"microbatches": 4}, data={"kind": "synthetic"}))


def changed(**sections: Any) -> Job:
    document = deepcopy(OLD)
    for section, keys in sections.items():
        if isinstance(keys, dict):
            document[section].update(keys)
    return Job.model_validate(document)


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"mesh": {"pp": 4}},
        {"mesh": {"fsdp": 1, "dp_replicate": 2}},
        {"pipeline": {"microbatches": 2}, "train": {"micro_batch_size": 4}},
        {"pipeline": {"schedule": "gpipe", "seq_len_bucket": 64}},
        {"train": {"steps": 5000, "clip_norm": None, "precision": "bf16"}},
        {"train": {"precision": "bf16_pure", "reduce_dtype": "bf16"}},
        {"checkpoint": {"url": "s3://elsewhere", "keep": 1}, "recovery": {"max_restarts": 0}},
        {"recovery": {"policy": "own_policies:build"}},
        {"resources": {"device": "cpu"}, "data": {"eval": {"path": "held-out.txt"}}},
    ],
)
def test_mesh_schedule_steps_and_operations_may_change(sections: dict[str, Any]) -> None:
    assert check_resume(OLD, changed(**sections)) == []


@pytest.mark.parametrize(
    ("sections", "key", "values"),
    [
        ({"model": {"num_layers": 12}}, "model.num_layers", ("12", "8")),
        ({"data": {"kind": "text", "path": "x"}}, "data.kind", ("'text'", "'synthetic'")),
        ({"data": {"seq_len": 512}}, "data.seq_len", ("512", "256")),
        ({"data": {"packing": False}}, "data.packing", ("False", "True")),
        ({"data": {"eval": {"fraction": 0.1}}}, "data.eval", ("0.1", "not set")),
        ({"train": {"seed": 7}}, "train.seed", ("7", "0")),
        ({"train": {"optimizer": {"kind": "adamw", "state": "8bit"}}}, "train.optimizer.state", ("'8bit'", "'fp32'")),
        ({"train": {"micro_batch_size": 3}}, "pipeline.microbatches", ("24", "16")),
        ({"mesh": {"fsdp": 4}}, "pipeline.microbatches", ("32", "1 × 4 × 4 × 2")),
    ],
)
def test_another_model_data_or_batch_names_the_field_and_both_values(
    sections: dict[str, Any], key: str, values: tuple[str, ...]
) -> None:
    problems = check_resume(OLD, changed(**sections))
    assert key in [problem.key for problem in problems]
    problem = next(one for one in problems if one.key == key)
    assert all(value in problem.fault for value in values)
    assert problem.fix


def test_a_run_of_a_name_can_begin_once_and_a_resume_adds_its_job(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    assert write_spec(store, "kjv", OLD) == "kjv/spec.json"
    with pytest.raises(AlreadyExists, match="--resume"):
        write_spec(store, "kjv", OLD)
    later = written(changed(train={"steps": 99}))
    assert write_spec(store, "kjv", later, 2) == "kjv/spec-2.json"
    assert write_spec(store, "kjv", later, 3) == "kjv/spec-3.json"
    assert read_spec(store, "kjv") == later
    assert read_spec(store, "kjv", 1) == OLD
    with pytest.raises(CheckpointError, match="there is no run 'other' here"):
        read_spec(store, "other")


def of_steps(steps: int, schedule: dict[str, Any] | None = None, lr: float = 1e-2) -> Job:
    return changed(train={"steps": steps, "optimizer": {"kind": "adamw", "lr": lr}, "lr_schedule": schedule or COSINE})


COSINE = {"kind": "cosine", "warmup_steps": 10, "min_ratio": 0.1}


def test_more_steps_under_a_schedule_that_falls_to_the_last_one_let_the_rate_jump_with_a_word() -> None:
    warning = rate_jump(written(of_steps(200)), of_steps(1000), 200)
    assert warning is not None and warning.startswith(
        "the learning rate jumps from 0.001 at step 200 to 0.0092 at step 201: train.steps is 1000, was 200, and "
        "cosine falls to the last step. To keep 0.001, set train.optimizer.lr=0.001, "
    )
    linear = COSINE | {"kind": "linear", "min_ratio": 0.0}
    assert "To choose it, set" in (rate_jump(written(of_steps(20, linear)), of_steps(40, linear), 20) or "")


def test_a_rate_that_goes_on_or_that_the_job_sets_is_no_jump() -> None:
    constant = {"kind": "constant", "warmup_steps": 10}
    assert rate_jump(written(of_steps(200)), of_steps(200), 150) is None
    assert rate_jump(written(of_steps(1000)), of_steps(200), 200) is None, "there is no step 201"
    assert rate_jump(written(of_steps(200)), of_steps(1000), 5) is None, "still in the warm-up"
    assert rate_jump(written(of_steps(200, constant)), of_steps(1000, constant), 200) is None
    assert rate_jump(written(of_steps(200)), of_steps(1000, lr=2e-2), 200) is None
    assert rate_jump({"train": {"steps": "many"}}, of_steps(1000), 200) is None


def test_auto_means_what_the_run_was_trained_in() -> None:
    before = written(job(train={"precision": "bf16"}, model={"lora": {}}))
    again = as_recorded(job(model={"lora": {}}), before)
    assert check_resume(before, again) == [] and again.train.precision == "bf16", "the base of the adapters follows"
    (problem,) = check_resume(before, job(model={"lora": {}}).for_device("cpu"))
    assert problem.key == "model.lora.base"
    assert as_recorded(job(), {}) == as_recorded(job(), {"train": {"precision": ["x"]}}) == job()
