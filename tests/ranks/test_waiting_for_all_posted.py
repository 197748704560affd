"""What a run on GPUs does otherwise changes no bit: a warm-up before the first step, and receives
posted in one order. And no run hangs if its ranks wait, after all that they post, until it is done.

That is the worst case on NCCL (rule `nccl` of `tests/unit/schedules/deadlock.py`): a rank may at
any time have to wait for the whole device. `tests/unit/schedules` proves it for programs on paper.
Here the real ranks do it, with every message and collective of a run: those of stages, rings,
experts, FSDP, tied embeddings, the warm-up, the timed links, evaluation and decoding. gloo carries
them, and a send ends when its receive is posted. A run that would hang fails by its time limit.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import test_experts
import test_sampling
import torch
import torch.distributed as dist
from comparison import assert_identical
from harness import run_in_turn
from torch import Tensor
from training import document, merged, seat_of, thinned, train_steps

import raypp.stages.pipeline.runtime
from raypp.job.load import parse_job
from raypp.planning.decide import decide
from raypp.planning.schedules.catalogue import SCHEDULES
from raypp.rank.assemble import assemble
from raypp.rank.step.step import StepRunner, Stopwatch
from raypp.rank.step.warm_up import warm_up
from raypp.records import Requests
from raypp.stages.parallel.shard import local_part

MESSAGES = ("isend", "irecv")
COLLECTIVES = tuple(
    name
    for name in (
        "all_reduce", "all_to_all_single", "all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor",
        "reduce_scatter_single",
    )
    if hasattr(dist, name)
)  # fmt: skip


class Over(dist.Work):
    def wait(self, *_: Any) -> bool:
        return True


@contextmanager
def as_on_gpus() -> Iterator[pytest.MonkeyPatch]:
    """Posts receives as on NCCL, and makes a run begin with a warm-up."""
    new = StepRunner.__init__

    def cold(runner: StepRunner, *arguments: Any, **settings: Any) -> None:
        new(runner, *arguments, **settings)
        runner.warm = False

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(raypp.stages.pipeline.runtime, "posting_on", lambda device_type: "one_order")
        patch.setattr(StepRunner, "__init__", cold)
        yield patch


@contextmanager
def waiting_for_all_posted() -> Iterator[Counter[str]]:
    """As on GPUs, and each message and collective waits until it is done; yields how often."""
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

    with as_on_gpus() as patch:
        for name in (*MESSAGES, *COLLECTIVES):
            patch.setattr(dist, name, waiting(name, getattr(dist, name)))
        yield waits


WAYS: dict[str, Callable[[], Any]] = {
    "plain": nullcontext, "as on GPUs": as_on_gpus, "waiting": waiting_for_all_posted
}  # fmt: skip


def trained(rank: int, world: int, port: int, job: dict[str, Any], steps: int, way: str) -> dict[str, Any]:
    with WAYS[way]() as waits:
        found = train_steps(rank, world, port, job, steps)
    if way == "waiting":
        assert bool(waits["isend"] and waits["irecv"]) is (job["mesh"].get("pp", 1) > 1 or "cp" in job["mesh"])
    assert ["warm_up" in parts for parts in found["parts"]] == [way != "plain"] + [False] * (steps - 1)
    return found


def experts(mesh: dict[str, Any], **sections: Any) -> dict[str, Any]:
    return test_experts.document(mesh=mesh, pipeline={"microbatches": 4}, **sections)


PAIRED = {"stages_per_rank": 2}
TIED = {"model": {"tie_embeddings": True}, "microbatches": 4}
CASES: dict[str, tuple[dict[str, Any], int]] = {
    **{
        kind.name: (
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
    "the links are timed": (document(pp=2, microbatches=4, pipeline={"lookahead": "auto"}), 5),
    "lookahead, int8": (document(pp=2, pipeline={"lookahead": 2, "wire": {"compression": "int8"}}), 2),
    "tied": (document(pp=2, **TIED), 2),
    "tied, one stage": (document(**TIED), 2),
    "bf16, recomputed": (document(fsdp=2, train={"precision": "bf16", "activation_checkpointing": "full"}), 2),
    "bf16 weights": (document(pp=2, schedule="zbv", pipeline=PAIRED, train={"precision": "bf16_pure"}), 2),
    "sharded": (document(pp=2, fsdp=2, schedule="zbv", pipeline=PAIRED), 2),
    "sharded, interleaved": (document(pp=2, fsdp=2, schedule="interleaved_1f1b", pipeline=PAIRED), 2),
    "replicated": (document(pp=2, dp_replicate=2, train={"precision": "bf16"}), 2),
    "replicated, split": (document(pp=2, dp_replicate=2, schedule="zbv", pipeline=PAIRED), 2),
    "ring": (experts({"pp": 2, "cp": 2, "ep": 2}), 2),
    "ring of four": (experts({"cp": 4, "ep": 2}), 1),
    "ulysses": (experts({"pp": 2, "cp": 2, "cp_style": "ulysses", "ep": 2}), 2),
    "recomputed experts": (experts({"pp": 2, "fsdp": 2, "ep": 2}, train={"activation_checkpointing": "full"}), 1),
}
QUICK = ("1f1b", "zbv", "tied", "lookahead, int8")
GATE = ("sharded", "ring")


@pytest.mark.parametrize("name", thinned(CASES, QUICK, GATE))
def test_a_run_does_not_hang_and_has_the_same_bits(name: str) -> None:
    job, steps = CASES[name]
    world = parse_job(job).mesh.world
    plain, *others = map(merged, run_in_turn(world, trained, [(job, steps, way) for way in WAYS]))
    for other in others:
        assert_identical(other, plain)


def lived(rank: int, world: int, port: int, source: dict[str, Any], way: str) -> dict[str, Any]:
    with WAYS[way]() as waits:
        found = test_sampling.live(rank, world, port, source)
    assert way == "plain" or (waits["isend"] and waits["irecv"])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pp", "V"])
def test_a_whole_run_that_evaluates_and_decodes_does_not_hang(name: str, tmp_path: Path) -> None:
    cases = []
    for way in ("plain", "waiting"):
        source = test_sampling.source_of(name, True)
        source["checkpoint"] = {"url": str(tmp_path / way), "every_steps": 2, "memory_tier": True}
        source["train"]["eval_every_steps"] = 2
        source["data"]["eval"] = {"fraction": 0.05}
        cases.append((source, way))
    (plain, *_), (found, *_) = run_in_turn(2, lived, cases)
    assert (found["numbers"], found["samples"]) == (plain["numbers"], plain["samples"])
    assert {"evaluate", "sample", "save"} <= found["phases"]


def left_behind(rank: int, world: int, port: int, job: dict[str, Any]) -> list[str]:
    """Returns what a warm-up between two steps has changed."""
    parsed = parse_job(job)
    with assemble(decide(parsed), seat_of(rank, world, port, parsed), hang_timeout_s=60) as made:
        runner = StepRunner(made)
        for step in (1, 2):
            if step == 2:
                before = state_of(runner)
                read = runner.read(Requests(), Stopwatch())
                warm_up(
                    runner.built, runner.pipeline.program, runner.batches(read)[0], runner.share, runner.router_losses
                )
                after = state_of(runner)
            else:
                runner.run(step, runner.read(Requests(), Stopwatch()), Stopwatch())
    assert before.keys() == after.keys()
    return [name for name in before if not torch.equal(before[name], after[name])]


def state_of(runner: StepRunner) -> dict[str, Tensor]:
    """Returns copies of weights, gradients, optimizer state, router sums and random state."""
    found = {"random": torch.get_rng_state(), "router": runner.router_losses.take()}
    for module in runner.built.modules:
        for name, parameter in module.named_parameters():
            found[name] = local_part(parameter).detach().clone()
            if parameter.grad is not None:
                found[f"{name}.grad"] = local_part(parameter.grad).clone()
            for key, value in runner.optimizer.state[parameter].items():
                found[f"{name}.{key}"] = local_part(torch.as_tensor(value)).clone()
        for name, buffer in module.named_buffers():
            found[f"buffer {name}"] = buffer.clone()
    return found


def test_a_warm_up_changes_no_state() -> None:
    job = experts({"pp": 2, "fsdp": 2, "ep": 2}, model={"tie_embeddings": True})
    (found,) = run_in_turn(4, left_behind, [(job,)])
    assert found == [[]] * 4
