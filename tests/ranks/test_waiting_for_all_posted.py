"""No run hangs if its ranks wait, after everything that they post, until it is done.

That is the worst case on NCCL (rule `nccl` of `tests/unit/schedules/deadlock.py`): a rank may at
any time have to wait for the whole device. `tests/unit/schedules` proves it for programs on paper.
Here the real ranks do it, with every message and collective of a run: those of stages, rings,
experts, FSDP, tied embeddings, the warm-up, the timed links, evaluation and decoding. gloo carries
them, and a send ends when its receive is posted. A run that would hang fails by its time limit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import test_experts
import test_sampling
import torch.distributed as dist
from comparison import assert_identical
from harness import run_in_turn
from test_mesh_does_not_change_numbers import document
from training import merged, thinned, train_steps

import raypp.pipeline.runtime
from raypp.schedules.catalogue import SCHEDULES
from raypp.train.step import StepRunner

pytestmark = pytest.mark.ranks

MESSAGES = ("isend", "irecv")
COLLECTIVES = tuple(
    name
    for name in (
        "all_reduce",
        "all_to_all_single",
        "all_gather_into_tensor",
        "all_gather_single",
        "reduce_scatter_tensor",
        "reduce_scatter_single",
    )
    if hasattr(dist, name)
)


class Over(dist.Work):
    """A message or collective that is done."""

    def wait(self, *_: Any) -> bool:
        return True


@contextmanager
def waiting_for_all_posted() -> Iterator[Counter[str]]:
    """Posts receives as on NCCL, and makes every message and collective wait until it is done.

    Yields how often each of them waited.
    """
    waits: Counter[str] = Counter()

    def waiting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def posted(*arguments: Any, **settings: Any) -> Any:
            work = function(*arguments, **settings)
            # The world's messages are the tokens of decoding. They are in host memory: gloo carries
            # them on CUDA, too, and the host does not wait for them.
            if work is None or (name in MESSAGES and settings.get("group") is None):
                return work
            work.wait()
            waits[name] += 1
            return Over()

        return posted

    new = StepRunner.__init__

    def cold(runner: StepRunner, *arguments: Any, **settings: Any) -> None:
        new(runner, *arguments, **settings)
        runner.warm = False

    with pytest.MonkeyPatch.context() as patch:
        for name in (*MESSAGES, *COLLECTIVES):
            patch.setattr(dist, name, waiting(name, getattr(dist, name)))
        patch.setattr(raypp.pipeline.runtime, "posting_on", lambda device_type: "one_order")
        patch.setattr(StepRunner, "__init__", cold)
        yield waits


def trained(rank: int, world: int, port: int, job: dict[str, Any], steps: int, waiting: bool) -> dict[str, Any]:
    with waiting_for_all_posted() if waiting else nullcontext(Counter[str]()) as waits:
        found = train_steps(rank, world, port, job, steps)
    assert bool(waits["isend"] and waits["irecv"]) is waiting
    return found


def tied() -> dict[str, Any]:
    found = document(pp=2, microbatches=4)
    found["model"] |= {"num_layers": 4, "tie_embeddings": True}
    return found


def experts(mesh: dict[str, Any], **sections: Any) -> dict[str, Any]:
    return test_experts.document(mesh=mesh, pipeline={"microbatches": 4}, **sections)


CASES: dict[str, tuple[int, dict[str, Any], int]] = {
    **{
        kind.name: (
            3,
            document(
                pp=3,
                layers=6,
                microbatches=6,
                schedule=kind.name,
                pipeline={"stages_per_rank": kind.nearest_stages(2), "lookahead": 2 if kind.name == "1f1b" else 0},
            ),
            1,
        )
        for kind in SCHEDULES
    },
    "the links are timed": (2, document(pp=2, microbatches=4, pipeline={"lookahead": "auto"}), 5),
    "tied": (2, tied(), 1),
    "sharded": (4, document(pp=2, fsdp=2, microbatches=4, schedule="zbv", pipeline={"stages_per_rank": 2}), 1),
    "replicated": (4, document(pp=2, dp_replicate=2, microbatches=4, train={"precision": "bf16"}), 1),
    "ring": (4, experts({"pp": 2, "cp": 2, "ep": 2}), 1),
    "ring of four": (4, experts({"cp": 4, "ep": 2}), 1),
    "ulysses": (4, experts({"pp": 2, "cp": 2, "cp_style": "ulysses", "ep": 2}), 1),
    "recomputed experts": (4, experts({"pp": 2, "fsdp": 2, "ep": 2}, train={"activation_checkpointing": "full"}), 1),
}
QUICK, GATE = ("1f1b", "zbv", "tied"), ("sharded", "ring")


@pytest.mark.parametrize("name", thinned(CASES, QUICK, GATE))
def test_a_run_does_not_hang_and_has_the_same_bits(name: str) -> None:
    world, job, steps = CASES[name]
    plain, other = run_in_turn(world, trained, [(job, steps, False), (job, steps, True)])
    assert_identical(merged(other), merged(plain))


def lived(rank: int, world: int, port: int, source: dict[str, Any], waiting: bool) -> dict[str, Any]:
    with waiting_for_all_posted() if waiting else nullcontext(Counter[str]()) as waits:
        found = test_sampling.live(rank, world, port, source)
    assert bool(waits["isend"] and waits["irecv"]) is waiting
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pp", "V"])
def test_a_whole_run_that_evaluates_and_decodes_does_not_hang(name: str, tmp_path: Path) -> None:
    cases = []
    for waiting in (False, True):
        source = test_sampling.source_of(name, True)
        source["checkpoint"] = {"url": str(tmp_path / str(waiting)), "every_steps": 2, "memory_tier": True}
        source["train"]["eval_every_steps"] = 2
        source["data"]["eval"] = {"fraction": 0.05}
        cases.append((source, waiting))
    (plain, *_), (found, *_) = run_in_turn(2, lived, cases)
    assert (found["numbers"], found["samples"]) == (plain["numbers"], plain["samples"])
    assert {"evaluate", "sample", "save"} <= found["phases"]
