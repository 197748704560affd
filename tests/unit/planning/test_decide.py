"""What follows from a job and its devices is decided once, and the record says all of it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raypp.errors import CheckpointError
from raypp.job.job import Job
from raypp.job.job_file import load_job
from raypp.job.load import parse_job
from raypp.planning.decide import decide
from raypp.planning.decision import Decision, Facts
from raypp.planning.memory import memories
from raypp.records import StepReport
from raypp.state.checkpoint.layout import decision_key
from raypp.state.checkpoint.retention import delete_run
from raypp.state.checkpoint.run_spec import read_decision, write_decision
from raypp.state.run_records.status import speed_text
from raypp.storage.directory import DirectoryStore

JOBS = sorted(Path(__file__).parents[3].glob("jobs/*.yaml"))
CARDS = Facts("cuda", gpus=(8,) * 8, cards=("NVIDIA H100 80GB HBM3",), memory=80 << 30)
OPEN = {"train.compile", "train.precision", "mesh.reduce_gradients", "model.lora.base"}
"""What ranks must never find open."""


def job(**sections: Any) -> Job:
    mesh = {"pp": 2, **sections.pop("mesh", {})}
    return parse_job({"name": "d", "mesh": mesh, "pipeline": {"microbatches": 4}, **sections})


ZBV = {"schedule": "zbv", "stages_per_rank": 2}


def autos(document: Any, key: str = "") -> set[str]:
    """Returns the keys of a document whose value is auto."""
    if isinstance(document, dict):
        return set().union(*(autos(value, f"{key}.{name}".lstrip(".")) for name, value in document.items()))
    return {key} if document == "auto" else set()


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
@pytest.mark.parametrize("facts", [Facts(), CARDS], ids=["cpu", "cuda"])
def test_a_decision_leaves_nothing_open_and_is_the_same_after_its_way_to_a_rank(path: Path, facts: Facts) -> None:
    decision = decide(load_job(path, []).job, facts)
    document = decision.document()
    read = Decision.read(json.loads(json.dumps(document)))
    assert read == decision and read.document() == document
    assert read.pipeline.program == decision.pipeline.program
    assert not autos(document["job"]) & OPEN and not autos({**document, "job": {}})
    assert decide(decision.job, facts) == Decision(**{**vars(decision), "remarks": {}}), (
        "deciding again changes nothing"
    )
    assert len(json.dumps(document)) < 20_000, "small enough to go with each seat"


@pytest.mark.parametrize(
    ("sections", "compiler", "reason"),
    [
        ({}, True, "blocks are compiled"),
        ({}, False, "blocks are not compiled: there is no C compiler"),
        ({"pipeline": ZBV}, True, "blocks are compiled"),
        ({"pipeline": ZBV, "mesh": {"tp": 2}}, True, "blocks are compiled"),
        ({"pipeline": ZBV, "train": {"precision": "fp8"}}, True, "blocks are not compiled: zbv splits backwards"),
        ({"train": {"sample": {"prompts": ["In"]}}}, True, "blocks are not compiled: train.sample decodes"),
    ],
)
def test_compilation_follows_nodes_and_schedule(sections: dict[str, Any], compiler: bool, reason: str) -> None:
    decision = decide(job(**sections), Facts("cuda", compiler=compiler))
    assert decision.remarks["train.compile"].startswith(reason)
    assert decision.job.train.compiles == (reason == "blocks are compiled") and not decision.pipeline.whole_backwards
    asked = decide(job(**{**sections, "train": {"compile": False}}), CARDS)
    assert not asked.job.train.compiles and not asked.remarks


def test_depths_of_the_warm_up_fit_by_the_plan_of_their_programs() -> None:
    deep = job(mesh={"pp": 4}, pipeline={"microbatches": 12}, model={"num_layers": 4})
    decision = decide(deep, Facts("cuda"))
    pipeline = decision.pipeline
    for depth, planned in enumerate(decision.depth_bytes):
        ranks = memories(decision.job, pipeline, pipeline.simulator(depth), "cuda")
        assert planned == max(rank.total for rank in ranks)
    fits = decision.depths_within(decision.depth_bytes[1])
    assert fits is not None and fits(1, None) and not fits(len(decision.depth_bytes) - 1, None)
    assert not fits(len(decision.depth_bytes), None), "what was not planned for does not fit"
    assert decision.depths_within(0) is None, "without a device's size, all do"


@pytest.mark.parametrize(
    ("content", "why"),
    [(None, "is missing"), ("{", "JSON"), ('{"version": 99}', "layout version 99"), ("cut", "is not a decision")],
)
def test_a_stored_decision_that_cannot_be_used_is_named(tmp_path: Path, content: str | None, why: str) -> None:
    store, key = DirectoryStore(tmp_path), decision_key("d", 3)
    decision = decide(job(resources={"env": {"API_TOKEN": "very-secret-value"}}))
    write_decision(store, decision, 3)
    assert b"very-secret-value" not in (tmp_path / key).read_bytes()
    assert read_decision(store, "d", 3).pipeline == decision.pipeline
    if content is None:
        (tmp_path / key).unlink()
    elif content == "cut":
        document = json.loads((tmp_path / key).read_text())
        document["pipeline"]["cut"] = "everything"
        (tmp_path / key).write_text(json.dumps(document))
    else:
        (tmp_path / key).write_text(content)
    with pytest.raises(CheckpointError, match=why) as caught:
        read_decision(store, "d", 3)
    assert f"{key}" in str(caught.value)
    delete_run(store, "d")
    assert list(store.list("")) == [], "a run that is deleted leaves no decision"


def test_the_flops_of_a_step_are_six_for_each_weight_and_those_of_attention_within_documents() -> None:
    sizes = {"num_layers": 2, "hidden_size": 8, "num_heads": 2, "num_kv_heads": 1, "ffn_size": 16, "vocab_size": 300}
    weights = 2 * (8 * 8 * 2 + 8 * 4 * 2 + 3 * 8 * 16) + 8 * 300  # the embedding multiplies nothing
    decision = decide(job(model=sizes, data={"seq_len": 64}), CARDS)
    keys = 10 * 10 / 2 + 2 * 6 * 6 / 2
    assert decision.flops([10, 6, 6]) == pytest.approx(6 * weights * 22 + 12 * 2 * 4 * 2 * keys)
    decision = decide(job(model={"kind": "mistral", "sliding_window": 4, **sizes}, data={"seq_len": 64}), CARDS)
    assert decision.flops([10]) == pytest.approx(6 * weights * 10 + 12 * 2 * 4 * 2 * 4 * (10 - 2)), "windows"


def test_the_peak_is_that_of_the_slowest_card_and_unknown_without_one() -> None:
    assert decide(job(), Facts("cuda", cards=("NVIDIA H200", "NVIDIA A100-SXM4-80GB"))).peak_tflops == 312
    assert decide(job(), Facts("cuda", cards=("NVIDIA H200", "no such card"))).peak_tflops == 0
    assert decide(job()).peak_tflops == 0
    report = StepReport(1, 2.0, 1.0, 100, 8, 0.5, 200.0, 1, extras={"aux_loss": 2.0}, flops=4e12, gpus=2)
    assert replace(report, peak_tflops=16).values == {"tflops": 4.0, "mfu": 0.25, "aux_loss": 2.0}
    assert report.values == {"tflops": 4.0, "aux_loss": 2.0}
    assert replace(report, gpus=0).values == {"aux_loss": 2.0}
    sent = replace(report, gpus=0, extras={}, wire_bytes=8, compressed=True)
    assert sent.values == {"wire_bytes": 8}
    assert replace(sent, compressed=False, replica_bytes=0).values == {"wire_bytes": 8, "replica_bytes": 0}
    assert speed_text({"tokens_per_s": 1e4, "tflops": 4.0, "mfu": 0.25, "peak_tflops": 16.0}) == (
        "10k · 4 TFLOP/s per GPU, MFU 25.0 % of 16"
    )
