"""`train.optimizer.offload` changes no bit, neither of the weights nor of a checkpoint."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from comparison import assert_identical
from harness import run_ranks
from late_copies import LateCopies
from test_optimizers import OPTIMIZERS, Quiet, job
from training import Batch, seat_of, thinned, train_steps

from raypp.checkpoint.announce import Announcements
from raypp.checkpoint.load_checkpoint import load_checkpoint
from raypp.checkpoint.save import CheckpointSaver
from raypp.parallel.shard import local_part
from raypp.planning import offload
from raypp.ports import free_ports
from raypp.records import Event, Requests
from raypp.spec.load import parse_job
from raypp.storage.directory import DirectoryStore
from raypp.train import optimizer_offload
from raypp.train.assemble import assemble
from raypp.train.step import StepRunner, Stopwatch

pytestmark = pytest.mark.ranks
STEPS = 3
FOUR = {"pp": 2, "fsdp": 2}
SHAPES: dict[str, tuple[str, dict[str, int]]] = {
    "one process": ("fp32", {}),
    "fsdp": ("fp32", {"fsdp": 2}),
    "pp": ("fp32", {"pp": 2}),
    "bf16, one process": ("bf16", {}),
    "bf16, fsdp": ("bf16", {"fsdp": 2}),
    "bf16, replicas": ("bf16", {"dp_replicate": 2}),
    "bf16, pp": ("bf16", {"pp": 2}),
}


def job_of(kind: str, shape: str, offloaded: bool) -> dict[str, Any]:
    precision, mesh = SHAPES[shape]
    found = copy.deepcopy(job(kind, **mesh))
    found["train"] |= {"precision": precision}
    found["train"]["optimizer"] = {**found["train"]["optimizer"], "offload": offloaded}
    return found


def in_small_blocks(*arguments: Any) -> dict[str, Any]:
    """Trains with many blocks, so that each arrives while another is updated, as late as it may."""
    offload.BLOCK = 2000
    optimizer_offload.CopyStreams = LateCopies  # type: ignore[misc]
    return train_steps(*arguments)


KINDS = [(kind, shape) for kind in OPTIMIZERS for shape in SHAPES]


def batch(world: int, *shapes: str) -> Batch:
    cases = {(k, s, o): job_of(k, s, o) for k in OPTIMIZERS for s in shapes for o in (False, True)}
    return Batch(world, cases, STEPS, train=in_small_blocks)


ONE = batch(1, "one process", "bf16, one process")
TWO = batch(2, *(s for s, (_, mesh) in SHAPES.items() if mesh))


@pytest.mark.parametrize(("kind", "shape"), thinned(KINDS, [("muon", "bf16, fsdp")]))
def test_offloading_changes_no_bit(kind: str, shape: str) -> None:
    found = TWO if SHAPES[shape][1] else ONE
    assert_identical(found[kind, shape, True], found[kind, shape, False])


SMALL = {
    (precision, mesh, offloaded): {
        **(found := job_of("adamw", mesh, offloaded)),
        "train": {
            **found["train"],
            "precision": precision,
            "optimizer": {**found["train"]["optimizer"], "state": "8bit"},
        },
    }
    for precision in ("fp32", "bf16", "bf16_pure")
    for mesh in ("fsdp", "pp")
    for offloaded in (False, True)
}
SMALL_RUNS = Batch(2, SMALL, STEPS, train=in_small_blocks)


@pytest.mark.parametrize(
    ("precision", "mesh"), thinned(dict.fromkeys(case[:2] for case in SMALL), [("bf16_pure", "fsdp")])
)
def test_offloading_moments_in_8_bits_changes_no_bit(precision: str, mesh: str) -> None:
    assert_identical(SMALL_RUNS[precision, mesh, True], SMALL_RUNS[precision, mesh, False])


@pytest.mark.slow
def test_weights_that_are_freed_after_use_are_gathered_from_the_bf16_copy() -> None:
    found = []
    for offloaded in (False, True):
        source = job_of("adamw", "bf16, fsdp", offloaded)
        source["mesh"]["reshard_after_forward"] = True
        found.append(run_ranks(2, in_small_blocks, source, STEPS))
    for ours, theirs in zip(found[1], found[0], strict=True):
        assert_identical(ours, theirs)


@pytest.mark.parametrize("precision", thinned(["bf16", "bf16_pure"], [], ["bf16_pure"]))
def test_checkpoints_of_moments_in_8_bits_resume_with_and_without(precision: str, tmp_path: Path) -> None:
    plain, offloaded = SMALL[precision, "fsdp", False], SMALL[precision, "fsdp", True]
    lines = {"plain": [plain] * 3, "turns": [offloaded, plain, offloaded]}
    for name, line in lines.items():
        run_ranks(2, lives, line, free_ports(len(line)), str(tmp_path / name))
    assert saved(tmp_path / "turns") == saved(tmp_path / "plain")


def lives(
    rank: int, world: int, port: int, sources: list[dict[str, Any]], meeting: list[int], root: str
) -> dict[str, Any]:
    """Trains one step per job, each resumed from the checkpoint of the one before.

    Args:
        rank: This rank.
        world: Number of ranks.
        port: Unused.
        sources: The jobs.
        meeting: The port of each job's rendezvous.
        root: Directory of the store.

    Returns:
        `weights`: the local parts; `dtypes`: what FSDP gathers from; `told`: the events.
    """
    offload.BLOCK = 2000
    optimizer_offload.CopyStreams = LateCopies  # type: ignore[misc]
    store, told = DirectoryStore(Path(root)), []
    found: dict[str, Any] = {}
    for step, source in enumerate(sources, 1):
        parsed = parse_job(source)
        seat = seat_of(rank, world, meeting[step - 1], parsed)

        def tell(event: Event) -> None:
            told.append((event.kind, event.message))

        with assemble(parsed, seat, hang_timeout_s=60, tell=tell) as made:
            runner = StepRunner(made)
            loaded = load_checkpoint(store, parsed.name, None, made.built.modules, made.optimizer)
            assert (loaded.step if loaded else 0) == step - 1
            if loaded and loaded.data_position:
                made.loader.seek(loaded.data_position)
            watch = Stopwatch()
            runner.run(step, runner.read(Requests(), watch), watch)
            announcements = Announcements(made.rendezvous, 1)
            saver = CheckpointSaver(store, parsed.name, {}, seat, announcements, Quiet(), 9, commit_timeout_s=60)
            saver.save(step, made.built.modules, made.optimizer, {"data_position": made.loader.position()})
            assert saver.wait() == step
            saver.close()
            found["weights"] = {n: local_part(p).clone() for m in made.built.modules for n, p in m.named_parameters()}
            dist.barrier()  # rank 0 serves the announcements: it leaves when all have connected
    return {**found, "told": told}


def saved(root: Path) -> dict[str, bytes]:
    """Returns the bytes of all tensors' files, by name without the random part of an attempt."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and "rank" in path.name
    }


@pytest.mark.parametrize(
    ("kind", "shape"),
    thinned(
        [*((kind, "bf16, fsdp") for kind in OPTIMIZERS), ("adamw", "fsdp"), ("adamw", "bf16, one process")],
        [("adamw", "bf16, one process")],
    ),
)
def test_checkpoints_have_the_same_bytes_and_resume_with_and_without(kind: str, shape: str, tmp_path: Path) -> None:
    world = 2 if SHAPES[shape][1] else 1
    plain, offloaded = job_of(kind, shape, False), job_of(kind, shape, True)
    lines = {"plain": [plain] * 3, "offloaded": [offloaded] * 3, "in turn": [offloaded, plain, offloaded]}
    results = {
        name: run_ranks(world, lives, line, free_ports(len(line)), str(tmp_path / name.replace(" ", "-")))
        for name, line in lines.items()
    }
    files = {name: saved(tmp_path / name.replace(" ", "-")) for name in lines}
    assert len(files["plain"]) >= 3 * world
    assert files["offloaded"] == files["plain"]
    assert files["in turn"] == files["plain"]
    for name in ("offloaded", "in turn"):
        for ours, theirs in zip(results[name], results["plain"], strict=True):
            assert all(torch.equal(ours["weights"][n], value) for n, value in theirs["weights"].items())
    events = [words for kind_, words in results["offloaded"][0]["told"] if kind_ == "offload"]
    assert len(events) == 3 and "saves none" in events[0]
    assert not [1 for kind_, _ in results["plain"][0]["told"] if kind_ == "offload"]


def where(rank: int, world: int, port: int, source: dict[str, Any]) -> dict[str, Any]:
    """Trains a step and returns what is held where."""
    offload.BLOCK = 2000
    parsed = parse_job(source)
    with assemble(parsed, seat_of(rank, world, port, parsed), hang_timeout_s=60) as made:
        runner = StepRunner(made)
        watch = Stopwatch()
        runner.run(1, runner.read(Requests(), watch), watch)
        optimizer: Any = made.optimizer
        parameters = [p for module in made.built.modules for p in module.parameters()]
        held = {tensor.data_ptr() for tensor in optimizer._host.values()}
        state = [v for p in parameters for v in optimizer.state[p].values() if v.numel() > 1]
        return {
            "masters in host memory": all(local_part(p).data_ptr() in held for p in parameters),
            "state in host memory": all(local_part(v).data_ptr() in held for v in state),
            "gathered from": {str(shard.dtype) for shard in optimizer._gathered.values()},
            "kept": len(optimizer._host),
            "parameters": len(parameters),
        }


def test_between_two_updates_the_device_has_bf16_weights_only() -> None:
    for found in run_ranks(2, where, job_of("adamw", "bf16, fsdp", True)):
        assert found["masters in host memory"] and found["state in host memory"]
        assert found["gathered from"] == {"torch.bfloat16"}
        assert found["kept"] == 3 * found["parameters"]
