"""For every optimizer: the mesh does not change its updates, and its state moves between meshes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from comparison import assert_identical, assert_same_sums
from harness import run_ranks
from test_mesh_does_not_change_numbers import document
from training import Batch, InBothTypes, seat_of, thinned, whole

from raypp.checkpoint.announce import Announcements
from raypp.checkpoint.load_checkpoint import load_checkpoint
from raypp.checkpoint.save import CheckpointSaver
from raypp.kinds import OPTIMIZERS as OPTIMIZER_KINDS
from raypp.records import Event, Requests
from raypp.spec.load import parse_job
from raypp.storage.directory import DirectoryStore
from raypp.train.assemble import assemble
from raypp.train.step import StepRunner, Stopwatch

pytestmark = pytest.mark.ranks
STEPS = 3
SETTINGS: dict[str, dict[str, Any]] = {"sgd": {"lr": 0.1}, "muon": {"momentum": 0.95}}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    kind.name: {"kind": kind.name, "lr": 3e-3, **SETTINGS.get(kind.name, {})} for kind in OPTIMIZER_KINDS.usable()
}


def job(kind: str, **mesh: int) -> dict[str, Any]:
    replicas = mesh.get("fsdp", 1) * mesh.get("dp_replicate", 1)
    found = document(**mesh, microbatches=4 // replicas, train={"optimizer": OPTIMIZERS[kind]})
    # An odd width, so that the shards of two ranks differ in size.
    found["model"] |= {"num_layers": 4, "ffn_size": 45}
    return found


MESHES = [{"fsdp": 2}, {"dp_replicate": 2}, {"fsdp": 4}, {"pp": 2, "fsdp": 2}]


def on_meshes(*meshes: dict[str, int]) -> dict[Any, dict[str, Any]]:
    return {(kind, str(mesh)): job(kind, **mesh) for kind in OPTIMIZERS for mesh in meshes}


ONE, PIPELINED = Batch(1, on_meshes({}), STEPS), Batch(2, on_meshes({"pp": 2}), STEPS)
SUMS_OF_ONE = InBothTypes(1, on_meshes({}), STEPS)
SUMS = {
    2: InBothTypes(2, on_meshes(*MESHES[:2]), STEPS),
    4: InBothTypes(4, on_meshes(*MESHES[2:]), STEPS),
}


def one_process(kind: str) -> dict[str, Any]:
    return ONE[kind, "{}"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_under_a_pipeline_every_weight_has_the_bits_of_one_process(kind: str) -> None:
    assert_identical(PIPELINED[kind, str({"pp": 2})], one_process(kind))


@pytest.mark.parametrize(("kind", "mesh"), thinned(on_meshes(*MESHES), [], [("muon", str({"fsdp": 4}))]))
def test_on_data_parallel_meshes_every_weight_is_that_of_one_process(kind: str, mesh: str) -> None:
    found = SUMS[2] if mesh in map(str, MESHES[:2]) else SUMS[4]
    assert_same_sums(found.numbers((kind, mesh)), SUMS_OF_ONE.numbers((kind, "{}")))


class Quiet:
    def phase(self, name: str, detail: str = "", reached: object = None) -> None:
        pass

    def event(self, event: Event) -> None:
        pass


def train_on(rank: int, world: int, port: int, source: dict[str, Any], root: str, steps: int) -> dict[str, Any]:
    """Resumes from the newest checkpoint, if there is one, and saves another if any step was taken.

    Returns:
        The optimizer state as loaded and at the end, and the weights, all unsharded.
    """
    job = parse_job(source)
    seat = seat_of(rank, world, port, job)
    store = DirectoryStore(Path(root))
    with assemble(job, seat, hang_timeout_s=60) as made:
        built, optimizer, loader = made.built, made.optimizer, made.loader
        runner = StepRunner(made)
        loaded = load_checkpoint(store, job.name, None, built.modules, optimizer)
        done = loaded.step if loaded else 0
        if loaded and loaded.data_position:
            loader.seek(loaded.data_position)

        def state() -> dict[str, torch.Tensor]:
            return {
                f"{name}/{key}": whole(value)
                for module in built.modules
                for name, parameter in module.named_parameters()
                for key, value in optimizer.state[parameter].items()
            }

        before = state()
        for step in range(done + 1, done + steps + 1):
            watch = Stopwatch()
            runner.run(step, runner.read(Requests(), watch), watch)
        saver = CheckpointSaver(
            store, job.name, {}, seat, Announcements(made.rendezvous, 1), Quiet(), 3, commit_timeout_s=60
        )
        if steps:
            saver.save(done + steps, built.modules, optimizer, {"data_position": loader.position()})
            assert saver.wait() == done + steps
        saver.close()
        weights = {name: whole(p) for module in built.modules for name, p in module.named_parameters()}
        after = state()
        dist.barrier()  # rank 0 serves the announcements: it leaves when all have connected
    return {"loaded": before, "state": after, "weights": weights}


@pytest.mark.parametrize("kind", thinned(OPTIMIZERS, ["muon"], ["adamw"]))
def test_a_checkpoint_of_two_shards_goes_on_as_one_process(kind: str, tmp_path: Path) -> None:
    run_ranks(2, train_on, job(kind, fsdp=2), str(tmp_path), STEPS - 1)
    (found,) = run_ranks(1, train_on, job(kind), str(tmp_path), 1)
    if OPTIMIZER_KINDS.get(kind).states:
        kept = {name: value for name, value in found["loaded"].items() if not name.endswith("/step")}
        assert any(bool(value.any()) for value in kept.values())
    for name, value in one_process(kind)["weights"].items():
        assert float((found["weights"][name] - value).norm() / value.norm()) <= 1e-5, name


def test_an_optimizers_state_has_its_parameters_shape(tmp_path: Path) -> None:
    run_ranks(1, train_on, job("muon"), str(tmp_path), 1)
    (found,) = run_ranks(1, train_on, job("muon"), str(tmp_path), 1)
    for name, value in found["loaded"].items():
        parameter, _, key = name.rpartition("/")
        assert key == "step" or value.shape == found["weights"][parameter].shape
        assert isinstance(value, torch.Tensor)
