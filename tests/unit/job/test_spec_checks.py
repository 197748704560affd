"""Checks of a job that need neither a mesh nor a cluster."""

import json
from pathlib import Path
from typing import Any

import pytest

from raypp.job.availability import named_kinds
from raypp.job.checks import check_spec
from raypp.job.load import job_document, parse_job
from raypp.job.optimizer_groups import check_groups
from raypp.planning.plan import recipe_remarks


def found(directory: Path | None = None, **sections: Any) -> dict[str, str]:
    job = parse_job({"name": "a", "data": {"kind": "synthetic"}, **sections})
    problems = check_spec(job, directory)
    assert all(problem.fix for problem in problems), "every problem has a fix"
    return {problem.key: f"{problem.fault} | {problem.fix}" for problem in problems}


def test_a_model_and_a_schedule_may_be_ones_own() -> None:
    assert found(model={"kind": "json:loads", "any_key": 3}, pipeline={"schedule": "json:loads"}) == {}
    missing = found(model={"kind": "my.module:build"}, pipeline={"schedule": "my.module:order"})
    assert missing.keys() == {"model.kind", "pipeline.schedule"}
    assert all("cannot import 'my.module'" in problem for problem in missing.values())


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        ("KIND = SourceKind(NAME)", "is read without importing the file: write its arguments as literals"),
        ("KIND = SourceKind('mine', 'rows', endigns=())", "endigns"),
        ("KIND = SourceKind('mine'", "never closed"),
    ],
)
def test_a_declaration_that_cannot_be_read_is_a_problem_of_its_key(
    text: str, reported: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wrong_rows.py").write_text(f"{text}\n")
    monkeypatch.syspath_prepend(tmp_path)
    problems = found(data={"kind": "wrong_rows:read"})
    assert list(problems) == ["data.kind"]
    assert reported in problems["data.kind"]


def test_every_default_is_available() -> None:
    job = parse_job({"name": "a"})
    assert {key for key, choice, value in named_kinds(job) if value not in choice.available()} == set()


INT8 = {"sync": {"kind": "int8"}}
OUTER_10 = {"sync": {"kind": "outer", "every_steps": 10}}


@pytest.mark.parametrize(
    ("sections", "key", "reported"),
    [
        ({"model": {"kind": "lama"}}, "model.kind", "there is no 'lama'; there are: llama, qwen2"),
        ({"data": {"kind": "tex"}}, "data.kind", "there is no 'tex'"),
        ({"pipeline": {"schedule": "1F1B"}}, "pipeline.schedule", "there is no '1F1B'"),
        ({"train": {"optimizer": {"kind": "adam"}}}, "train.optimizer.kind", "there is no 'adam'"),
        ({"recovery": {"policy": "defualt"}}, "recovery.policy", "there is no 'defualt'; there are: default | did you"),
        ({"model": {"hidden_size": 250}}, "model.hidden_size", "250 is not divisible by 4 heads | use a multiple of"),
        ({"model": {"hidden_size": 12}}, "model.hidden_size", "the head width 3 is odd"),
        ({"model": {"head_dim": 33}}, "model.head_dim", "the head width 33 is odd"),
        ({"model": {"num_kv_heads": 3}}, "model.num_kv_heads", "4 query heads cannot be split evenly over 3"),
        ({"data": {"kind": "synthetic", "document_len": [9, 2]}}, "data.document_len", "write [2, 9]"),
        ({"train": {"optimizer": {"kind": "sgd", "state": "8bit"}}}, "train.optimizer.state", "sgd"),
        ({"train": {"optimizer": {"kind": "muon", "state": "8bit"}}}, "train.optimizer.state", "adamw"),
        ({"train": {"global_batch": 27}, "mesh": {"fsdp": 2}}, "train.global_batch", "use 24 or 28"),
        ({"train": {"global_batch": {"tokens": 1000}}}, "train.global_batch.tokens",
         "1,000 tokens, 3.90625 rows of 256,"),
        ({"train": {"global_batch": 24}, "pipeline": {"microbatches": 3}}, "pipeline.microbatches",
         "3 are 6 rows of a step"),
        ({"checkpoint": {"best": {"keep": 2}}}, "checkpoint.best", "nothing is evaluated"),
        ({"checkpoint": {"best": {}, "every_steps": 10}, "train": {"eval_every_steps": 15},
          "data": {"kind": "synthetic", "eval": {"fraction": 0.1}}}, "checkpoint.best",
         "evaluations every 15 steps and saves every 10"),
        ({"recovery": {"on_spike": "skip"}}, "recovery.on_spike", "skip has no effect: recovery.spike_factor is null"),
        ({"recovery": {"on_spike": "stop", "spike_factor": 3}, "mesh": {"dp_replicate": 2}, "train": OUTER_10},
         "recovery.on_spike", "stop is not available where replicas train apart"),
    ],
)  # fmt: skip
def test_what_does_not_work_is_refused_with_what_does(sections: dict[str, Any], key: str, reported: str) -> None:
    problems = found(**sections)
    assert list(problems) == [key] and reported in problems[key]


@pytest.mark.parametrize(
    "sections",
    [
        {"model": {"hidden_size": 250, "head_dim": 32}},
        {"data": {"path": "s3://bucket/none.txt"}},
        *({"train": {"optimizer": {"kind": kind}, "precision": "bf16_pure"}} for kind in ("adamw", "sgd", "muon")),
        *({"mesh": {"pp": 2, "dp_replicate": 7}, "train": {**INT8, "precision": name}} for name in ("fp32", "bf16")),
        {"mesh": {"dp_replicate": 2, "fsdp": 4}, "train": INT8},
    ],
)
def test_what_works_has_no_problem(sections: dict[str, Any]) -> None:
    assert found(**sections) == {}


def test_bytes_need_257_ids_and_synthetic_data_does_not(tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("x")
    assert "bytes tokenizer" in found(model={"vocab_size": 256}, data={"path": str(text)})["model.vocab_size"]
    assert found(model={"vocab_size": 257}, data={"path": str(text)}) == {}
    assert found(model={"vocab_size": 16}) == {}


def test_a_missing_path_says_where_it_was_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    beside = tmp_path / "jobs"
    problems = found(beside, data={"path": "no.txt"})
    assert problems["data.path"] == f"there is no no.txt | check the path; searched {tmp_path} and {beside}"
    assert "nothing matches *.none" in found(beside, data={"path": "*.none"})["data.path"]
    assert "is missing: kind jsonl reads files" in found(data={"kind": "jsonl"})["data.path"]


def test_an_empty_file_and_an_empty_directory_are_reported(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "sub").mkdir()
    assert "is empty" in found(data={"path": str(tmp_path / "empty.txt")})["data.path"]
    assert "contains no files" in found(data={"path": str(tmp_path / "sub")})["data.path"]


def test_a_tokenizer_is_a_file_or_the_folder_of_one(tmp_path: Path) -> None:
    text, tokenizer = tmp_path / "a.txt", tmp_path / "tokenizer.json"
    text.write_text("x")
    tokenizer.write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 999}}}))
    data = {"path": str(text), "tokenizer": str(tokenizer)}
    assert found(model={"vocab_size": 900}, data=data) == {}, "whether the data use more is seen as they are encoded"
    assert found(data={**data, "tokenizer": str(tmp_path)}) == {}
    (tmp_path / "none").mkdir()
    assert "has no tokenizer.json" in found(data={**data, "tokenizer": str(tmp_path / "none")})["data.tokenizer"]
    tokenizer.write_text("{")
    assert "is not a tokenizer.json" in found(data=data)["data.tokenizer"]
    assert "there is no" in found(data={**data, "tokenizer": "none.json"})["data.tokenizer"]
    assert "is a URL" in found(data={**data, "tokenizer": "s3://bucket/tokenizer.json"})["data.tokenizer"]


def test_a_smallest_size_above_the_largest_is_reported() -> None:
    elastic = {"min_ranks": 3, "max_ranks": 2}
    problems = found(mesh={"pp": 4}, recovery={"elastic": elastic})
    assert problems["recovery.elastic.min_ranks"].startswith("3 is more than the 2 ranks")
    assert "recovery.elastic.min_ranks" not in found(mesh={"pp": 4}, recovery={"elastic": elastic | {"max_ranks": 3}})


@pytest.mark.parametrize(
    ("change", "reported"),
    [
        ({"train": {}}, "has no effect without replicas that train apart"),
        ({"mesh": {"pp": 2}}, "has no effect without replicas that train apart"),
        ({"recovery": {"site_timeout_s": 9, "elastic": True}}, "remove one of the two"),
    ],
)
def test_a_time_after_which_sites_are_left_out_needs_sites_and_rules_alone(
    change: dict[str, Any], reported: str
) -> None:
    job = {
        "mesh": {"pp": 2, "dp_replicate": 2},
        "train": {"sync": {"kind": "outer"}},
        "recovery": {"site_timeout_s": 9},
    }
    assert reported in found(**{**job, **change})["recovery.site_timeout_s"]
    assert "recovery.site_timeout_s" not in found(**job)


def test_bf16_weights_are_refused_for_an_optimizer_that_does_not_say_that_it_can() -> None:
    own = {"optimizer": {"kind": "raypp.errors:build"}, "precision": "bf16_pure"}
    reported = found(train=own)["train.precision"]
    assert "raypp.errors:build" in reported and "use bf16" in reported
    assert "train.precision" not in found(train={**own, "precision": "bf16"})


@pytest.mark.parametrize(
    ("mesh", "train", "reported"),
    [
        ({"pp": 2}, {}, "int8 has no effect: mesh.dp_replicate is 1"),
        ({"dp_replicate": 8}, {}, "int8 saves nothing with 8 replicas: each sends its gradients to the 7 others"),
        ({"dp_replicate": 2}, {"precision": "bf16_pure"}, "int8 needs fp32 gradients, but train.precision: bf16_pure"),
        (
            {"dp_replicate": 2},
            {"precision": "bf16", "reduce_dtype": "bf16"},
            "int8 needs gradients that are summed in fp32, but train.reduce_dtype is bf16",
        ),
        ({"dp_replicate": 2, "fsdp": 2, "ep": 2}, {}, "int8 is not available with mesh.ep 2"),
    ],
)
def test_int8_sums_are_refused_where_they_do_nothing_or_cannot_work(
    mesh: dict[str, Any], train: dict[str, Any], reported: str
) -> None:
    problems = found(mesh=mesh, train={**INT8, **train}, model={"kind": "qwen3_moe"})
    assert problems["train.sync.kind"].startswith(reported)
    assert "exact" in problems["train.sync.kind"].partition(" | ")[2]
    assert "train.sync.kind" not in found(mesh=mesh, train=train, model={"kind": "qwen3_moe"})


EVAL = {"eval": {"fraction": 0.02}}
OUTER = {"kind": "outer", "every_steps": 20, "compression": "int4"}


@pytest.mark.parametrize(
    ("key", "other", "reported"),
    [
        ("train.sync.kind", {"mesh": {"pp": 2}}, "outer has no effect: mesh.dp_replicate is 1"),
        ("train.sync.kind", {"train": {"precision": "bf16_pure"}}, "outer needs fp32 weights"),
        ("train.sync.compression", {"mesh": {"dp_replicate": 16}}, "int4 saves nothing with 16 replicas"),
        ("checkpoint.every_steps", {"checkpoint": {"every_steps": 25}}, "25 is no multiple of train.sync.every_steps"),
        ("train.eval_every_steps", {"train": {"eval_every_steps": 30}, "data": EVAL}, "30 is no multiple of"),
        ("train.sample.every_steps", {"train": {"sample": {"prompts": ["a"], "every_steps": 5}}}, "5 is no multiple"),
        ("train.sync.every_steps", {"train": {"steps": 10}}, "20 is more than the 10 steps of the run"),
        ("train.sync.every_steps", {"train": {"sync": {**OUTER, "fragments": 3}}}, "use train.sync.fragments: 1"),
        (
            "train.sync.every_steps",
            {"checkpoint": {"every_steps": 56}, "train": {"sync": {**OUTER, "fragments": 7}}},
            "use 14, or train.sync.fragments: 1",
        ),
        ("train.sync.every_steps", {"train": {"sync": {**OUTER, "every_steps": "auto", "fragments": 3}}}, "no number"),
        ("train.sync.overlap_steps", {"train": {"sync": {**OUTER, "fragments": 4, "overlap_steps": 5}}}, "at most 4"),
        ("train.sync.fragments", {"train": {"sync": {**OUTER, "fragments": 10}}}, "use at most 8"),
    ],
)
def test_outer_steps_are_refused_where_they_do_nothing_or_replicas_would_differ(
    key: str, other: dict[str, Any], reported: str
) -> None:
    job = {"mesh": {"dp_replicate": 2}, "checkpoint": {"every_steps": 40}, "train": {}} | other
    outer = {"steps": 200, "sync": OUTER}
    assert reported in found(**{**job, "train": {**outer, **job["train"]}})[key]
    assert key not in found(**{**job, "train": {**outer, **job["train"], "sync": {"kind": "exact"}}})
    fine = found(mesh={"dp_replicate": 2}, checkpoint={"every_steps": 40}, train={**outer, "precision": "bf16"})
    assert fine == {}


@pytest.mark.parametrize(
    ("groups", "problem"),
    [
        (["lm_heads"], "[0].match: 'lm_heads' matches no trained parameter"),
        (["lm_head", "head|norm"], "[1].match: groups[0] matches lm_head.weight, too"),
        (["a", "(b"], "[1].match: is no regular expression: missing )"),
    ],
)
def test_groups_of_parameters_match_something_and_nothing_twice(groups: list[str], problem: str) -> None:
    made = parse_job({"name": "a", "train": {"optimizer": {"groups": [{"match": one} for one in groups]}}})
    assert [f"train.optimizer.groups{problem}" in f"{one.key}: {one.fault}" for one in check_groups(made)] == [True]


def test_of_adapters_only_their_own_names_count_and_the_plan_lists_them() -> None:
    lora = {"num_layers": 2, "lora": {"rank": 2, "targets": ["q_proj"]}}
    groups = [{"match": "lora_B", "lr_factor": 16}]
    made = parse_job({"name": "a", "model": lora, "train": {"optimizer": {"groups": groups}}})
    assert list(check_groups(made)) == []
    assert list(recipe_remarks(made)) == [
        "train.optimizer.groups[0]: lr × 16: model.layers.0.self_attn.q_proj.lora_B.weight, "
        "model.layers.1.self_attn.q_proj.lora_B.weight"
    ]


@pytest.mark.parametrize(
    ("batch", "mesh", "microbatches"),
    [(24, {}, 12), (24, {"fsdp": 2}, 6), (24, {"dp_replicate": 2, "fsdp": 3}, 2), ({"tokens": 6144}, {"fsdp": 2}, 6)],
)
def test_microbatches_follow_from_the_global_batch_on_every_mesh(batch: Any, mesh: Any, microbatches: int) -> None:
    made = parse_job({"name": "a", "mesh": mesh, "train": {"global_batch": batch}, "data": {"kind": "synthetic"}})
    assert (made.pipeline.microbatches, made.rows_per_step) == (microbatches, 24)
    assert check_spec(made) == [] and parse_job(job_document(made)) == made
