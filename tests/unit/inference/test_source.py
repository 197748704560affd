"""What an argument names: a run, its checkpoints, a Hugging Face folder, or nothing."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from hf_folder import write_hf_folder

from raypp.errors import CheckpointError, JobError
from raypp.job.load import parse_job
from raypp.state.checkpoint.layout import commit_key
from raypp.state.checkpoint.run_spec import write_spec
from raypp.storage.directory import DirectoryStore
from raypp.tools.inference import source
from raypp.tools.inference.rank import load_weights
from raypp.tools.inference.source import Source, find_source

TINY = Path(__file__).parents[3] / "jobs" / "data" / "tiny-qwen3"
SIZES = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "ffn_size": 48, "vocab_size": 97}


@pytest.fixture(autouse=True)
def _no_other_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYPP_HOME", str(tmp_path / "home"))


def test_a_hugging_face_folder_is_a_source_that_json_carries() -> None:
    source = find_source(str(TINY))
    assert (source.store, source.run, source.precision, source.eos_ids) == (None, "", "bf16", (256,))
    assert source.model["from_hf"] == str(TINY.absolute()) and source.model["num_layers"] == 2
    again = json.loads(json.dumps(asdict(source)))
    assert Source(**{**again, "eos_ids": (256,), "remarks": ()}) == source
    assert source.job(2).mesh.pp == 2


def test_ends_are_those_of_generation_config(tmp_path: Path) -> None:
    write_hf_folder(tmp_path, **SIZES)
    assert find_source(str(tmp_path)).eos_ids == (256,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 7]}')
    assert find_source(str(tmp_path)).eos_ids == (5, 7)
    for text in ("{", '["a"]', '{"eos_token_id": "no"}', '{"eos_token_id": [true, null, {}]}'):
        (tmp_path / "generation_config.json").write_text(text)
        if text == "{":
            with pytest.raises(JobError, match=r"generation_config.json: is not JSON"):
                find_source(str(tmp_path))
        else:
            assert find_source(str(tmp_path)).eos_ids in ((), (256,))


def test_ends_of_a_run_are_those_of_its_export(tmp_path: Path) -> None:
    """The ids that generation_config.json beside its tokenizer.json names; then the tokenizer's."""
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text("{}")
    assert source._ids_beside(str(tokenizer)) == ()
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 7]}')
    assert source._ids_beside(str(tokenizer)) == (5, 7)
    assert source._ids_beside("bytes") == source._ids_beside(str(tmp_path / "other.json")) == ()


def test_a_model_without_a_tokenizer_says_where_to_put_one(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"has no tokenizer\n  fix: put the tokenizer.json"):
        find_source(str(TINY)).open_tokenizer()
    write_hf_folder(tmp_path, **SIZES)
    small = Source(**{**vars(find_source(str(tmp_path))), "tokenizer": "bytes"})
    with pytest.raises(JobError, match=r"the token '∎' \(id 256\), but"):
        small.open_tokenizer()


def test_a_run_without_a_commit_gets_another_error_than_one_that_is_not_there(tmp_path: Path) -> None:
    write_spec(DirectoryStore(tmp_path), "begun", {"name": "begun"})
    with pytest.raises(CheckpointError, match=r"begun: has no committed checkpoint\n  fix: wait"):
        find_source(f"{tmp_path}/begun")
    with pytest.raises(JobError, match="step 7 of begun is not committed\n  fix: committed steps: none"):
        find_source(f"{tmp_path}/begun/step-00000007")
    with pytest.raises(JobError, match="there is no run 'never' below"):
        find_source(f"{tmp_path}/never")


def test_a_folder_that_is_neither_says_so(tmp_path: Path) -> None:
    other = tmp_path / "Some Folder"
    other.mkdir()
    with pytest.raises(JobError, match=r"is neither a run \(no spec.json, no checkpoint\) nor a Hugging Face model"):
        find_source(str(other))
    (other / "adapter_config.json").write_text("{}")
    with pytest.raises(JobError, match="has adapters without the model they belong to"):
        find_source(str(other))


def test_steps_belong_to_runs_and_are_named_once(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="is a Hugging Face model, which has no steps"):
        find_source(str(TINY), 3)
    write_spec(DirectoryStore(tmp_path), "begun", {"name": "begun"})
    with pytest.raises(JobError, match="--step: is 3, but RUN names step 7"):
        find_source(f"{tmp_path}/begun/step-00000007", 3)


def test_more_ranks_than_layers_are_refused() -> None:
    with pytest.raises(JobError, match=r"--mesh: pp=3 has more ranks than .* has layers, 2\n  fix: use pp=2"):
        find_source(str(TINY)).job(3)


def test_a_model_of_your_own_is_refused() -> None:
    own = Source("here", {"kind": "my_model:build", "num_layers": 2}, 64, "fp32", None)
    with pytest.raises(JobError, match="my_model:build of here is a model of your own"):
        own.job()


def test_a_checkpoint_that_its_run_removed_meanwhile_is_named_as_removed(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "store")
    job = parse_job({"name": "a", "model": {"kind": "llama", **SIZES}, "data": {"kind": "synthetic"}})
    removed = Source(
        f"{store.url}/a/step-00000005",
        job.model.model_dump(mode="json"),
        *(64, "fp32", None, (), store.url, "a", 5, {}, ()),
    )
    with pytest.raises(CheckpointError, match=r"step-00000005: was removed before it was read.*\n.*checkpoint\.keep"):
        load_weights(removed, job, [])
    store.put(commit_key("a", 5), b"{")
    with pytest.raises(CheckpointError) as torn:
        load_weights(removed, job, [])
    assert "removed" not in str(torn.value)
