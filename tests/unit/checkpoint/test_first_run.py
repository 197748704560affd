"""`model.from_run`: the model that a run takes over, and what is refused."""

from pathlib import Path
from typing import Any

import pytest

from raypp.errors import CheckpointError, JobError
from raypp.job.job_file import job_file
from raypp.job.load import job_document, parse_job
from raypp.state.checkpoint.from_run import check_first_run, with_run_model
from raypp.state.checkpoint.run_spec import write_spec
from raypp.storage.directory import DirectoryStore

OLD = {"kind": "qwen3", "num_layers": 3, "hidden_size": 32, "num_heads": 4, "ffn_size": 48, "vocab_size": 300}


@pytest.fixture
def run(tmp_path: Path) -> str:
    for name, model in {"old": OLD, "adapters": OLD | {"lora": {"rank": 2}}}.items():
        write_spec(DirectoryStore(tmp_path), name, job_document(parse_job({"name": name, "model": model})))
    return f"{tmp_path}/old"


def model_of(**model: Any) -> Any:
    return with_run_model(job_file(parse_job({"name": "new", "model": model}))).job.model


def test_a_run_has_the_model_of_the_other_but_for_the_keys_that_it_gives(run: str) -> None:
    taken = model_of(from_run=run, max_context=4096)
    assert (
        taken.model_dump()
        == parse_job({"name": "x", "model": OLD | {"from_run": run, "max_context": 4096}}).model.model_dump()
    )


@pytest.mark.parametrize(
    ("model", "fault"),
    [
        ({"from_run": "old"}, "old names no store"),
        ({"ffn_size": 80}, r"mlp.gate_proj.weight of old is 48 × 32, and .* 80 × 32\n.*leave out model.ffn_size"),
        ({"num_heads": 8, "head_dim": 4}, "num_heads of old is 4, and with the keys beside it would be 8"),
        ({"from_hf": "/elsewhere"}, "model.from_hf is set, too"),
        ({"lora": {"rank": 2}}, "raypp checkpoints export old DIR`"),
        ({"adapters": True}, "raypp checkpoints export adapters DIR --merged"),
        ({"kind": "llama"}, "old is of kind qwen3, not llama"),
    ],
)
def test_what_a_run_cannot_take_over_is_named(run: str, model: dict[str, Any], fault: str) -> None:
    if model.pop("adapters", False):
        run = run.replace("/old", "/adapters")
    with pytest.raises(JobError, match=fault):
        model_of(**({"from_run": run} | model))


def test_there_must_be_such_a_checkpoint_or_a_run_to_wait_for(run: str) -> None:
    check_first_run(run, [run])
    with pytest.raises(JobError, match=r"old has no checkpoint\n.*--after old"):
        check_first_run(run, [])
    with pytest.raises(JobError, match="old has no checkpoint of step 7"):
        check_first_run(f"{run}/step-00000007", [run])
    with pytest.raises(CheckpointError, match="gone"):
        model_of(from_run=run.replace("/old", "/gone"))
