"""A run that resumes on another mesh continues with the same numbers.

Every chain is a run of three steps on three meshes. The reference is one process that takes the
steps without interruption.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from collecting_reporter import CollectingReporter
from harness import run_in_living
from hf_folder import write_hf_folder
from safetensors.numpy import load_file
from test_experts import document as expert_document
from training import document, seat_of, thinned

from raypp.control.reshape import best_for, reshaped
from raypp.errors import CheckpointError
from raypp.job.load import job_document, parse_job
from raypp.planning.decide import decide
from raypp.rank.rank import run_rank
from raypp.stages.models.stage import build_stage
from raypp.state.checkpoint.commit import list_checkpoints, read_commit
from raypp.state.checkpoint.compatibility import check_resume
from raypp.state.checkpoint.diff import diff_checkpoints
from raypp.state.checkpoint.load_checkpoint import load_checkpoint
from raypp.state.checkpoint.saved_tensors import SavedTensors
from raypp.state.hf.import_model import import_hf
from raypp.state.hf.model_files import EMBEDDING, HEAD, HfFiles
from raypp.state.hf.names import hf_parts
from raypp.storage.directory import DirectoryStore

Sections = dict[str, Any]
ONE: Sections = {}
VIRTUAL = {"schedule": "interleaved_1f1b", "stages_per_rank": 2}
V = {"schedule": "zbv", "stages_per_rank": 2}


def mesh(pipeline: Sections | None = None, **sizes: int) -> Sections:
    return {"mesh": sizes, "pipeline": pipeline or {}}


@dataclass(frozen=True)
class Chain:
    """A model, and the meshes of its three steps.

    Attributes:
        model: Differences from the small Llama.
        meshes: The mesh of each step.
        exact: True if every bit must equal that of one process. Otherwise the bound is 1e-5.
    """

    model: Sections
    meshes: tuple[Sections, ...]
    exact: bool


MOE = {"kind": "qwen3_moe"}
LORA = {"lora": {"rank": 4, "base": "fp32"}}
DROPOUT = {"lora": {**LORA["lora"], "dropout": 0.2}}
NF4 = {"hidden_size": 64, "ffn_size": 128, "lora": {"rank": 4, "base": "nf4"}}
TIED = "tied, pp 4, 2 in a V, 1"
CHAINS = {
    "pp 4, 2 with virtual stages, 1": Chain({}, (mesh(pp=4), mesh(VIRTUAL, pp=2), ONE), True),
    TIED: Chain({"tie_embeddings": True}, (mesh(pp=4), mesh(V, pp=2), ONE), True),
    "pp 2, 1, 4": Chain({}, (mesh(pp=2), ONE, mesh(pp=4)), True),
    "fsdp 2, 1, 4": Chain({}, (mesh(fsdp=2), ONE, mesh(fsdp=4)), False),
    "cp 2, 1, cp 2 with pp 2": Chain({}, (mesh(cp=2), ONE, mesh(cp=2, pp=2)), False),
    "ep 2, 1, ep 2 with cp 2": Chain(MOE, (mesh(fsdp=2, ep=2), ONE, mesh(fsdp=2, cp=2, ep=2)), False),
    "tp 2, 1, tp 2 with fsdp 2": Chain({}, (mesh(tp=2), ONE, mesh(tp=2, fsdp=2)), False),
    "odd words, tp 2 with pp 2, 1, tp 4": Chain({"vocab_size": 97}, (mesh(tp=2, pp=2), ONE, mesh(tp=4)), False),
    "experts, fsdp 2, tp 2 with ep 2, 1": Chain(MOE, (mesh(fsdp=2), mesh(tp=2, fsdp=2, ep=2), ONE), False),
    "adapters on nf4, tp 2, fsdp 2, 1": Chain(NF4, (mesh(tp=2), mesh(fsdp=2), ONE), False),
    "adapters, pp 2, 1, 2 in a V": Chain(LORA, (mesh(pp=2), ONE, mesh(V, pp=2)), True),
    "adapters with dropout, pp 2, 1, 2 in a V": Chain(DROPOUT, (mesh(pp=2), ONE, mesh(V, pp=2)), True),
    "adapters on nf4, pp 2, fsdp 2, 1": Chain(NF4, (mesh(pp=2), mesh(fsdp=2), ONE), False),
    "adapters of experts, ep 2, pp 2, 1": Chain({**MOE, **LORA}, (mesh(fsdp=2, ep=2), mesh(pp=2), ONE), False),
}  # fmt: skip
QUICK = (TIED, "adapters on nf4, pp 2, fsdp 2, 1")
GATE = ("ep 2, 1, ep 2 with cp 2",)
ROWS = 4
"""Microbatches per step, over all replicas."""


def job_of(chain: Chain, url: Path, step: int, sections: Sections) -> Sections:
    """Returns the chain's job up to a step, on that step's mesh."""
    found = expert_document() if chain.model.get("kind") == "qwen3_moe" else document()
    sizes = sections.get("mesh", {})
    replicas = sizes.get("fsdp", 1) * sizes.get("dp_replicate", 1)
    found["model"] |= chain.model
    found["mesh"] = sizes
    found["pipeline"] |= {"microbatches": ROWS // replicas, "schedule": "1f1b", **sections.get("pipeline", {})}
    # A cosine schedule would depend on train.steps.
    found["train"] |= {"steps": step, "lr_schedule": {"kind": "constant", "warmup_steps": 1}}
    found["checkpoint"] = {"url": str(url), "every_steps": 0, "memory_tier": False}
    return found


def live(rank: int, world: int, port: int, source: Sections, attempt: int) -> Sections:
    reported = CollectingReporter()
    job = parse_job(source)
    result = run_rank(decide(job), seat_of(rank, world, port, job, attempt=attempt), reported)
    kinds = [event.kind for event in reported.events]
    numbers = [(r.step, r.loss, r.grad_norm, r.tokens) for r in reported.reports]
    return {"numbers": numbers, "kinds": kinds, "committed": result.checkpoint_step}


def run_all(jobs: list[tuple[Sections, int]]) -> list[list[Sections]]:
    """Runs jobs, each an attempt; those with the same number of ranks in the same processes."""
    return [run_in_living(parse_job(job).mesh.world, live, live, job, attempt) for job, attempt in jobs]


def tensors(root: Path, job: str = "numbers") -> SavedTensors:
    store = DirectoryStore(root)
    return SavedTensors(store, read_commit(store, job, list_checkpoints(store, job)[-1].step))


@pytest.mark.parametrize("name", thinned(CHAINS, QUICK, GATE))
def test_a_run_goes_on_with_another_mesh_as_if_nothing_had_happened(name: str, tmp_path: Path) -> None:
    chain, changed, whole = CHAINS[name], tmp_path / "changed", tmp_path / "whole"
    found: dict[int, tuple] = {}
    lives = [(job_of(chain, changed, step, sections), step) for step, sections in enumerate(chain.meshes, 1)]
    for step, results in enumerate(run_all(lives), 1):
        assert all(result["committed"] == step for result in results)
        assert ("resumed" in results[0]["kinds"]) == (step > 1)
        # A resumed run reports its last steps again. Their values must not have changed.
        for number, *rest in results[0]["numbers"]:
            assert found.setdefault(number, tuple(rest)) == tuple(rest)
    ((reference,),) = run_all([(job_of(chain, whole, 3, ONE), 1)])
    expected = {number: tuple(rest) for number, *rest in reference["numbers"]}
    assert reference["committed"] == 3 and "resumed" not in reference["kinds"]
    assert list(found) == list(expected) == [1, 2, 3]
    run = "experts" if chain.model.get("kind") == "qwen3_moe" else "numbers"
    comparison = diff_checkpoints(tensors(changed, run), tensors(whole, run))
    assert not (comparison.only_a or comparison.only_b or comparison.other_form)
    if chain.exact:
        assert found == expected
        assert comparison.same, [one.name for one in comparison.different]
        return
    for step, (loss, norm, tokens) in expected.items():
        assert found[step] == (pytest.approx(loss, rel=1e-5), pytest.approx(norm, rel=1e-5), tokens)
    # A step of Adam has length lr = 3e-3 whatever the gradient. A gradient near zero may turn a
    # rounding into a part of such a step: here less than a thirtieth of one.
    assert max(one.max_abs for one in comparison.different if not one.name.startswith("optim/")) < 1e-4


def elastic_job(root: Path, steps: int, room: int) -> Sections:
    """Returns the job of 4 ranks up to a step, as it runs with room for `room` ranks."""
    sections = job_of(CHAINS["fsdp 2, 1, 4"], root, steps, mesh(pp=2, dp_replicate=2))
    job = parse_job(sections | {"recovery": {"elastic": True}})
    shape = best_for(job, room)
    assert shape is not None
    return job_document(reshaped(job, shape))


@pytest.mark.parametrize(("room", "world"), thinned([(3, 2), (1, 1)], [], [(3, 2)]))
def test_shrinking_and_growing_changes_neither_losses_nor_weights(tmp_path: Path, room: int, world: int) -> None:
    """A run that loses half of its ranks and regains them takes the steps of an undisturbed run."""
    changed, undisturbed = tmp_path / "changed", tmp_path / "undisturbed"
    lives = [(elastic_job(changed, step, there), step) for step, there in ((1, 4), (2, room), (3, 4))]
    first, second, third, reference = run_all([*lives, (elastic_job(undisturbed, 3, 4), 1)])
    assert len(second) == world
    assert "resumed" in second[0]["kinds"] and "resumed" in third[0]["kinds"]
    reported = {step: numbers for part in (first, second, third) for step, *numbers in part[0]["numbers"]}
    assert list(reported) == [1, 2, 3]
    for step, loss, norm, tokens in reference[0]["numbers"]:
        assert reported[step] == [pytest.approx(loss, rel=1e-5), pytest.approx(norm, rel=1e-5), tokens]
    comparison = diff_checkpoints(tensors(changed), tensors(undisturbed))
    assert not (comparison.only_a or comparison.only_b or comparison.other_form)
    assert max((one.max_abs for one in comparison.different), default=0.0) < 1e-5


def test_a_tied_checkpoint_is_not_taken_for_an_untied_model(tmp_path: Path) -> None:
    tied, untied = (job_of(Chain({"tie_embeddings": ties}, (), True), tmp_path, 1, ONE) for ties in (True, False))
    run_all([(tied, 1)])
    store = DirectoryStore(tmp_path)
    problems = check_resume(read_commit(store, "numbers", 1).job, parse_job(untied))
    assert [problem.key for problem in problems] == ["model.tie_embeddings"]
    options = parse_job(untied).model
    whole = build_stage(options, range(options.num_layers), first=True, last=True).to_empty(device="cpu")
    with pytest.raises(CheckpointError, match=r"lm_head\.weight: is not in the checkpoint"):
        load_checkpoint(store, "numbers", 1, [whole], None)


HF_MESHES = {"one": ONE, "pp 2": mesh(pp=2), "fsdp 4": mesh(fsdp=4), "fsdp 2 · cp 2, ep 2": mesh(fsdp=2, cp=2, ep=2)}


GROWN = 3
"""Rows that a job adds to the model it starts from."""


def tuned(url: Path, folder: Path, steps: int, sections: Sections) -> Sections:
    """Returns a job that starts from a model's weights and, with lr 0, does not change them."""
    found = job_of(Chain(MOE, (), True), url, steps, sections)
    found["model"] |= {"from_hf": str(folder), "num_layers": 2}
    found["model"]["vocab_size"] += GROWN
    found["train"]["optimizer"] = {"kind": "sgd", "lr": 0.0, "momentum": 0.0, "weight_decay": 0.0}
    return found


@pytest.mark.gate
def test_weights_of_a_named_and_grown_model_are_the_same_bits_on_any_mesh_and_read_once(tmp_path: Path) -> None:
    sizes = {**expert_document()["model"], "num_layers": 2}
    sizes = {key: value for key, value in sizes.items() if key not in ("kind", "aux_loss_weight", "z_loss_weight")}
    before = write_hf_folder(tmp_path / "hf", kind="qwen3_moe", **sizes)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        mean = (np.add.reduce(before[name].astype(np.float64), axis=0) / len(before[name])).astype(np.float32)
        before[name] = np.concatenate([before[name], np.tile(mean, (GROWN, 1))])
    jobs = [(tuned(tmp_path / name, tmp_path / "hf", 1, sections), 1) for name, sections in HF_MESHES.items()]
    # The other way to use a model: import it as a checkpoint of step 0, and resume from that.
    imported, files = tuned(tmp_path / "imported", tmp_path / "hf", 1, mesh(pp=2)), HfFiles(str(tmp_path / "hf"))
    del imported["model"]["from_hf"]
    job = parse_job(imported)
    import_hf(files, DirectoryStore(tmp_path / "imported"), job.name, job.model, imported, object_bytes=9000)
    *named, last = run_all([*jobs, (imported, 2)])
    assert all("loaded_from_hf" in results[0]["kinds"] for results in named)
    assert "resumed" in last[0]["kinds"] and last[0]["committed"] == 1
    for name in (*HF_MESHES, "imported"):
        _assert_holds(tensors(tmp_path / name, "experts"), before)
    # Puts other weights in the same place. A resumed run must not read them.
    write_hf_folder(tmp_path / "hf", 1, kind="qwen3_moe", **sizes)
    (results,) = run_all([(tuned(tmp_path / "pp 2", tmp_path / "hf", 2, ONE), 2)])
    assert "resumed" in results[0]["kinds"] and "loaded_from_hf" not in results[0]["kinds"]
    _assert_holds(tensors(tmp_path / "pp 2", "experts"), before)
    assert not _same(load_file(tmp_path / "hf" / "model.safetensors"), before)
    # Others on another mesh begin with that run's newest checkpoint, or that of a step.
    others = [tuned(tmp_path / name, tmp_path / "hf", 1, mesh(fsdp=2)) for name in ("newest", "first")]
    for other, step in zip(others, ("", "/step-00000001"), strict=True):
        other["model"] |= {"from_run": f"{tmp_path / 'pp 2'}/experts{step}", "from_hf": None}
    for results in run_all([(other, 1) for other in others]):
        assert {"loaded_from_run", "loaded_from_hf", "resumed"} & {*results[0]["kinds"]} == {"loaded_from_run"}
    for name in ("newest", "first"):
        _assert_holds(tensors(tmp_path / name, "experts"), before)


@pytest.mark.gate
def test_a_grown_tied_embedding_is_the_same_bits_on_any_mesh_and_trains_as_in_one_process(tmp_path: Path) -> None:
    sizes = {key: value for key, value in document()["model"].items() if key != "kind"} | {"tie_embeddings": True}
    before = write_hf_folder(tmp_path / "hf", **sizes)[EMBEDDING]
    mean = (np.add.reduce(before.astype(np.float64), axis=0) / len(before)).astype(np.float32)
    grown = np.concatenate([before, np.tile(mean, (GROWN, 1))])
    meshes = {"one": ONE, "pp 2": mesh(pp=2), "pp 2 · fsdp 2": mesh(pp=2, fsdp=2)}

    def job(name: str, lr: float) -> Sections:
        found = job_of(Chain({"from_hf": str(tmp_path / "hf")}, (), True), tmp_path / f"{name} {lr}", 1, meshes[name])
        found["model"] |= {"tie_embeddings": True, "vocab_size": sizes["vocab_size"] + GROWN}
        found["train"]["optimizer"] = {"kind": "sgd", "lr": lr, "momentum": 0.0, "weight_decay": 0.0}
        return found

    jobs = {(name, lr): job(name, lr) for name in meshes for lr in (0.0, 0.1)}
    reports = dict(zip(jobs, run_all([(one, 1) for one in jobs.values()]), strict=True))
    numbers = {key: results[0]["numbers"] for key, results in reports.items()}
    weights = {}
    for name, lr in jobs:
        held = tensors(tmp_path / f"{name} {lr}", document()["name"])
        assert HEAD not in held.infos
        weights[name, lr] = held.rows(EMBEDDING, 0, held.infos[EMBEDDING].rows)
    assert all(_same({"": weights[name, 0.0]}, {"": grown}) for name in meshes)
    assert numbers["pp 2", 0.1] == numbers["one", 0.1]
    assert _same({"": weights["pp 2", 0.1]}, {"": weights["one", 0.1]}) and not _same(
        {"": weights["one", 0.1]}, {"": grown}
    )
    np.testing.assert_allclose(weights["pp 2 · fsdp 2", 0.1], weights["one", 0.1], rtol=1e-5, atol=1e-7)


def _assert_holds(saved: SavedTensors, expected: Sections) -> None:
    found = {}
    for name, info in saved.infos.items():
        if not name.startswith("optim/"):
            whole = saved.rows(name, 0, info.rows)
            for part in hf_parts(name, info.shape):
                found[part.name] = whole if part.expert is None else whole[part.expert]
    assert _same(found, expected)


def _same(found: Sections, expected: Sections) -> bool:
    return found.keys() == expected.keys() and all(
        torch.equal(torch.from_numpy(found[name].copy()), torch.from_numpy(expected[name])) for name in expected
    )
