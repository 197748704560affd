"""Tied embeddings are one matrix, wherever the first and the last stage are."""

from pathlib import Path
from typing import Any

import pytest
import torch
from comparison import assert_identical, assert_same_sums
from harness import run_ranks
from test_optimizers import train_on
from training import STEPS, document, numbers, on_ranks, thinned, trained

from raypp.state.checkpoint.commit import read_commit
from raypp.state.checkpoint.ranged_reads import open_files
from raypp.storage.directory import DirectoryStore

MATRIX = "model.embed_tokens.weight"


def tied(**settings: Any) -> dict[str, Any]:
    return document(microbatches=4, model={"tie_embeddings": True}, **settings)


def assert_one_matrix(results: list[dict[str, Any]]) -> None:
    holders = [result for result in results if MATRIX in result["weights"]]
    assert not any("lm_head.weight" in result["weights"] for result in results)
    for holder in holders[1:]:
        assert torch.equal(holder["weights"][MATRIX], holders[0]["weights"][MATRIX])
        for ours, theirs in zip(holder["gradients"], holders[0]["gradients"], strict=True):
            assert torch.equal(ours[MATRIX], theirs[MATRIX])


CUTS: list[dict[str, Any]] = [
    {"pp": 2},
    {"pp": 3, "schedule": "gpipe"},
    {"pp": 2, "schedule": "interleaved_1f1b", "pipeline": {"stages_per_rank": 2}},
    {"pp": 2, "schedule": "zbv", "pipeline": {"stages_per_rank": 2}},
    {"pp": 1, "schedule": "gpipe", "pipeline": {"stages_per_rank": 1}},
]


@pytest.mark.parametrize(
    "settings",
    thinned(CUTS, CUTS[1:2], CUTS[3:4]),
    ids=["two ranks", "three ranks", "virtual stages", "both ends on one rank", "one stage"],
)
def test_both_ends_have_the_bits_of_one_process(settings: dict[str, Any]) -> None:
    assert_one_matrix(on_ranks(tied(**settings)))
    assert_identical(trained(tied(**settings)), trained(tied()))


MESHES = [{"fsdp": 2}, {"pp": 2, "fsdp": 2}, {"pp": 2, "dp_replicate": 2}]


@pytest.mark.parametrize("mesh", thinned(MESHES, MESHES[:1], MESHES[1:2]), ids=str)
def test_sharded_ends_add_up_what_one_process_does(mesh: dict[str, int]) -> None:
    job = tied(**mesh)
    for steps, dtype in ((1, torch.float32), (STEPS, torch.float64)):
        assert_one_matrix(on_ranks(job, steps, dtype=dtype))
    assert_same_sums(numbers(job), numbers(tied()))


@pytest.mark.slow
def test_in_bf16_too_the_ends_of_a_pipeline_have_the_bits_of_one_process() -> None:
    bf16 = {"precision": "bf16"}
    assert_one_matrix(on_ranks(tied(pp=2, train=bf16)))
    assert_identical(trained(tied(pp=2, train=bf16)), trained(tied(train=bf16)))


def test_a_checkpoint_has_one_entry_and_fills_both_ends(tmp_path: Path) -> None:
    run_ranks(2, train_on, tied(pp=2), str(tmp_path), STEPS - 1)
    store = DirectoryStore(tmp_path)
    files = open_files(store, read_commit(store, "numbers", STEPS - 1))
    entries = [entry.name for file in files for entry in file.header.entries]
    assert [name for name in entries if name == MATRIX or name.startswith("lm_head")] == [MATRIX]
    assert entries.count(f"optim/{MATRIX}/exp_avg") == 1
    results = run_ranks(2, train_on, tied(pp=2, schedule="gpipe"), str(tmp_path), 1)
    for result in results:
        assert torch.equal(result["weights"][MATRIX], trained(tied())["weights"][MATRIX])
