"""`train.optimizer.offload` changes no bit, neither of the weights nor of a checkpoint."""

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from comparison import assert_identical
from harness import run_in_turn, run_ranks
from late_copies import LateCopies
from test_optimizers import OPTIMIZERS, job, train_on
from training import on_ranks, seat_of, thinned, train_steps, trained

from raypp.job.load import parse_job
from raypp.planning import offload
from raypp.planning.decide import decide
from raypp.rank.assemble import assemble
from raypp.rank.optimizers import optimizer_offload
from raypp.rank.step.step import StepRunner, Stopwatch
from raypp.records import Requests
from raypp.stages.parallel.shard import local_part

SHAPES: dict[str, tuple[str, dict[str, int]]] = {
    "one process": ("fp32", {}),
    "fsdp": ("fp32", {"fsdp": 2}),
    "pp": ("fp32", {"pp": 2}),
    "bf16, one process": ("bf16", {}),
    "bf16, fsdp": ("bf16", {"fsdp": 2}),
    "bf16, replicas": ("bf16", {"dp_replicate": 2}),
    "bf16, pp": ("bf16", {"pp": 2}),
}


def job_of(kind: str, shape: str, offloaded: bool, state: str = "fp32", precision: str = "") -> dict[str, Any]:
    of_shape, mesh = SHAPES[shape]
    found = job(kind, **mesh)
    found["train"] |= {
        "precision": precision or of_shape,
        "optimizer": {**found["train"]["optimizer"], "state": state, "offload": offloaded},
    }
    return found


def in_small_blocks(*arguments: Any, train: Callable[..., dict[str, Any]] = train_steps) -> dict[str, Any]:
    """Trains with many blocks, so that each arrives while another is updated, as late as it may."""
    offload.BLOCK = 2000
    optimizer_offload.CopyStreams = LateCopies  # type: ignore[misc]
    return train(*arguments)


@pytest.mark.parametrize(("kind", "shape"), thinned(product(OPTIMIZERS, SHAPES), [("muon", "bf16, fsdp")]))
def test_offloading_changes_no_bit(kind: str, shape: str) -> None:
    assert_identical(*(trained(job_of(kind, shape, on), train=in_small_blocks) for on in (True, False)))


def in_8_bits(precision: str, mesh: str, offloaded: bool) -> dict[str, Any]:
    return job_of("adamw", mesh, offloaded, "8bit", precision)


SMALL = product(("fp32", "bf16", "bf16_pure"), ("fsdp", "pp"))


@pytest.mark.parametrize(("precision", "mesh"), thinned(SMALL, [("bf16_pure", "fsdp")]))
def test_offloading_moments_in_8_bits_changes_no_bit(precision: str, mesh: str) -> None:
    assert_identical(*(trained(in_8_bits(precision, mesh, on), train=in_small_blocks) for on in (True, False)))


@pytest.mark.slow
def test_weights_that_are_freed_after_use_are_gathered_from_the_bf16_copy() -> None:
    found = []
    for offloaded in (False, True):
        source = job_of("adamw", "bf16, fsdp", offloaded)
        source["mesh"]["reshard_after_forward"] = True
        found.append(on_ranks(source, train=in_small_blocks))
    for ours, theirs in zip(found[1], found[0], strict=True):
        assert_identical(ours, theirs)


def live(*arguments: Any) -> dict[str, Any]:
    return in_small_blocks(*arguments, train=train_on)


def lives(world: int, lines: dict[str, list[dict[str, Any]]], root: Path) -> dict[str, list[list[dict[str, Any]]]]:
    """Trains one step per job of each line, each resumed from the checkpoint of the one before in
    its line. Returns by line what each life's ranks found."""
    results = iter(
        run_in_turn(world, live, [(job, str(root / name), 1) for name, line in lines.items() for job in line])
    )
    found = {name: [next(results) for _ in line] for name, line in lines.items()}
    for of_line in found.values():
        assert [ranks[0]["resumed"] for ranks in of_line] == list(range(len(of_line)))
    return found


def saved(root: Path) -> dict[str, bytes]:
    """Returns the bytes of all tensors' files, by name without the random part of an attempt."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and "rank" in path.name
    }


@pytest.mark.parametrize("precision", thinned(["bf16", "bf16_pure"], [], ["bf16_pure"]))
def test_checkpoints_of_moments_in_8_bits_resume_with_and_without(precision: str, tmp_path: Path) -> None:
    plain, offloaded = (in_8_bits(precision, "fsdp", on) for on in (False, True))
    lives(2, {"plain": [plain] * 3, "in turn": [offloaded, plain, offloaded]}, tmp_path)
    assert saved(tmp_path / "in turn") == saved(tmp_path / "plain")


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
    found = lives(world, lines, tmp_path)
    files = saved(tmp_path / "plain")
    assert len(files) >= 3 * world
    for name in ("offloaded", "in turn"):
        assert saved(tmp_path / name) == files
        for ours, theirs in zip(found[name][-1], found["plain"][-1], strict=True):
            assert all(torch.equal(ours["weights"][n], value) for n, value in theirs["weights"].items())
    events = {
        name: [words for ranks in found[name] for kind_, words in ranks[0]["events"] if kind_ == "offload"]
        for name in ("offloaded", "plain")
    }
    assert len(events["offloaded"]) == 3 and "saves none" in events["offloaded"][0]
    assert not events["plain"]


def where(rank: int, world: int, port: int, source: dict[str, Any]) -> dict[str, Any]:
    offload.BLOCK = 2000
    parsed = parse_job(source)
    with assemble(decide(parsed), seat_of(rank, world, port, parsed), hang_timeout_s=60) as made:
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
