"""Snapshots in host memory: ranks are killed by real signals, and the run goes on at the step they had reached."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lives import Fate, Lives, same

pytestmark = pytest.mark.ranks

STEPS = 8
RUN = "remembers"


def document(**checkpoint: Any) -> dict[str, Any]:
    return {
        "name": RUN,
        "model": {
            "kind": "llama", "num_layers": 4, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "ffn_size": 48,
            "vocab_size": 96, "tie_embeddings": True,
        },
        "data": {"kind": "synthetic", "num_documents": 200, "document_len": [3, 50], "seq_len": 64},
        "mesh": {"pp": 2},
        "pipeline": {"schedule": "1f1b", "microbatches": 4, "lookahead": 0},
        "train": {"steps": STEPS, "micro_batch_size": 2, "seed": 3, "optimizer": {"kind": "adamw", "lr": 3e-3}},
        "checkpoint": {"memory_every_steps": 1, **checkpoint},
    }  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[int, float], dict[str, torch.Tensor]]:
    """Losses and final state of a run that nothing happens to, without the memory tier."""
    root = tmp_path_factory.mktemp("undisturbed")
    lives = Lives(document(memory_tier=False), root, [root, root], [0, 0])
    told = lives.attempt_once()
    assert sorted(told.losses) == list(range(1, STEPS + 1)), told
    return told.losses, lives.final_state()


@pytest.fixture
def shared_memory() -> Iterator[Callable[[], Path]]:
    """Makes a node's directory in shared memory; in the end each must be empty of files."""
    made: list[Path] = []

    def make() -> Path:
        made.append(Path(tempfile.mkdtemp(prefix="raypp-test-", dir="/dev/shm")))
        return made[-1]

    yield make
    left = [path.name for folder in made if folder.exists() for path in folder.iterdir()]
    for folder in made:
        shutil.rmtree(folder, ignore_errors=True)
    assert not left, f"left in shared memory: {left}"


@pytest.mark.parametrize("stay", [False, True], ids=["all processes new", "the survivor goes on in its process"])
def test_a_run_goes_on_at_the_step_that_a_killed_rank_had_reached(
    stay: bool, tmp_path: Path, shared_memory: Any, undisturbed: Any
) -> None:
    lives = Lives(document(), tmp_path, [shared_memory()] * 2, [0, 0])
    first = lives.attempt_once(Fate((1,), after=4), stay=stay)
    assert list(first.errors) == [0] and first.steps == [1, 2, 3, 4], first
    second = lives.attempt_once()
    assert second.restored() == "from memory: step 4 on all 2 ranks; nothing is committed"
    assert [result.step for result in second.results.values()] == [STEPS, STEPS]
    assert second.steps == [1, 2, 3, 4, 5, 6, 7, 8]  # the first four told again
    losses, state = undisturbed
    assert second.losses == losses and same(lives.final_state(), state)
