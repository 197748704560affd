"""Whole lives of ranks that share one device: evaluation, checkpoints, snapshots in host memory.

NCCL on a GPU, gloo without one.
"""

from pathlib import Path
from typing import Any

import pytest
from collecting_reporter import CollectingReporter
from local_run import Kill, LocalRun, same
from ranks import DEVICE, run_on_one_device, share_the_device

from raypp.job.load import parse_job
from raypp.planning.decide import decide
from raypp.planning.decision import Facts
from raypp.rank.own_seat import local_seat
from raypp.rank.rank import run_rank
from raypp.state.checkpoint.commit import list_checkpoints
from raypp.state.checkpoint.ranged_reads import verify_checkpoint
from raypp.storage.directory import DirectoryStore

STEPS = 6
ROUNDING = 1e-4
"""Bound on a loss's relative error: a GPU's kernels add in another order than the CPU's."""


def document(name: str, root: Path, **sections: Any) -> dict[str, Any]:
    found: dict[str, Any] = {
        "name": name,
        "model": {
            "kind": "llama", "num_layers": 4, "hidden_size": 64, "num_heads": 4, "num_kv_heads": 2, "ffn_size": 96,
            "vocab_size": 128, "tie_embeddings": True,
        },
        "data": {
            "kind": "synthetic", "num_documents": 120, "document_len": [3, 40], "seq_len": 64,
            "eval": {"fraction": 0.2},
        },
        "mesh": {"pp": 2},
        "pipeline": {"microbatches": 4, "lookahead": 0},
        "train": {
            "steps": STEPS, "micro_batch_size": 2, "seed": 3, "precision": "fp32", "tf32": False, "compile": False,
            "eval_every_steps": 3,
        },
        "checkpoint": {"url": str(root), "every_steps": 2, "keep": 9, "memory_tier": False},
    }  # fmt: skip
    return found | {key: found[key] | value for key, value in sections.items()}


def life(rank: int, world: int, port: int, job: dict[str, Any], device: str, attempt: int = 1) -> dict[str, Any]:
    reporter, parsed = CollectingReporter(), parse_job(job)
    result = run_rank(
        decide(parsed, Facts("cuda")), local_seat(rank, world, port, parsed, device=device, attempt=attempt), reporter
    )
    return {
        "step": result.step,
        "losses": {report.step: report.loss for report in reporter.reports},
        "resumed": [event.step for event in reporter.events if event.kind == "resumed"],
        "evaluated": {event.step: event.details["loss"] for event in reporter.events if event.kind == "evaluated"},
    }


@pytest.mark.gate
def test_a_run_saves_evaluates_and_resumes_as_on_the_cpu(tmp_path: Path) -> None:
    on_cpu = run_on_one_device(2, life, document("whole", tmp_path / "cpu"), "cpu")[0]
    whole = run_on_one_device(2, life, document("whole", tmp_path / "whole"), DEVICE)[0]
    for key in ("losses", "evaluated"):
        assert whole[key] == pytest.approx(on_cpu[key], rel=ROUNDING)
    assert sorted(whole["evaluated"]) == [3, 6]
    store = DirectoryStore(tmp_path / "whole")
    assert [commit.step for commit in list_checkpoints(store, "whole")] == [2, 4, 6]
    assert all(verify_checkpoint(store, "whole", step) == [] for step in (2, 4, 6))

    half = tmp_path / "half"
    first = run_on_one_device(2, life, document("half", half, train={"steps": 4}), DEVICE)[0]
    second = run_on_one_device(2, life, document("half", half), DEVICE, 2)[0]
    assert (first["resumed"], second["resumed"]) == ([], [4])
    # The reports of the first four steps are in the checkpoint and are reported again.
    assert second["losses"] == pytest.approx(whole["losses"], rel=1e-6)


@pytest.mark.slow
def test_a_killed_rank_resumes_from_snapshots_in_host_memory(tmp_path: Path, shared_memory: Any) -> None:
    tier = {"memory_tier": True, "memory_every_steps": 1, "every_steps": 0}
    killed = document("killed", tmp_path / "killed", checkpoint=tier, train={"eval_every_steps": 0})
    run = LocalRun(killed, tmp_path / "killed", [shared_memory()] * 2, [0, 0], device=DEVICE, prepare=share_the_device)
    first = run.attempt_once(Kill((1,), after=3))
    assert first.steps == [1, 2, 3], first
    second = run.attempt_once()
    assert second.restored() == "from memory: step 3 on all 2 ranks; nothing is committed"
    assert not first.left and not second.left

    calm = document("calm", tmp_path / "calm", train={"eval_every_steps": 0})
    undisturbed = LocalRun(calm, tmp_path / "calm", [tmp_path] * 2, [0, 0], device=DEVICE, prepare=share_the_device)
    reporter = undisturbed.attempt_once()
    assert second.losses == pytest.approx(reporter.losses, rel=1e-6)
    if DEVICE == "cpu":
        assert same(run.final_state(), undisturbed.final_state())
