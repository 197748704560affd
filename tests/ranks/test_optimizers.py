"""For every optimizer: the mesh does not change its updates, and its state moves between meshes."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from collecting_reporter import CollectingReporter
from comparison import assert_identical, assert_same_sums
from harness import run_in_turn, run_ranks
from training import STEPS, document, numbers, seat_of, thinned, trained, whole

from raypp.job.load import parse_job
from raypp.kinds import OPTIMIZERS as OPTIMIZER_KINDS
from raypp.planning.decide import decide
from raypp.rank.assemble import assemble
from raypp.rank.step.step import StepRunner, Stopwatch
from raypp.records import Requests
from raypp.state.checkpoint.announce import Announcements
from raypp.state.checkpoint.load_checkpoint import load_checkpoint
from raypp.state.checkpoint.save import CheckpointSaver
from raypp.storage.directory import DirectoryStore

GROUPS = [{"match": "down_proj", "lr_factor": 0.5, "weight_decay": 0}, {"match": "embed|lm_head", "lr_factor": 2}]
SETTINGS: dict[str, dict[str, Any]] = {"sgd": {"lr": 0.1}, "muon": {"momentum": 0.95}}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    kind.name: {"kind": kind.name, "lr": 3e-3, "groups": GROUPS, **SETTINGS.get(kind.name, {})}
    for kind in OPTIMIZER_KINDS.usable()
}


def job(kind: str, **mesh: int) -> dict[str, Any]:
    # An odd width, so that the shards of two ranks differ in size.
    return document(**mesh, microbatches=4, model={"ffn_size": 45}, train={"optimizer": OPTIMIZERS[kind]})


@pytest.mark.slow
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_under_a_pipeline_every_weight_has_the_bits_of_one_process(kind: str) -> None:
    assert_identical(trained(job(kind, pp=2)), trained(job(kind)))


MESHES = {str(mesh): mesh for mesh in ({"fsdp": 2}, {"dp_replicate": 2}, {"fsdp": 4}, {"pp": 2, "fsdp": 2})}


@pytest.mark.parametrize(("kind", "mesh"), thinned(product(OPTIMIZERS, MESHES), []))
def test_on_data_parallel_meshes_every_weight_is_that_of_one_process(kind: str, mesh: str) -> None:
    assert_same_sums(numbers(job(kind, **MESHES[mesh])), numbers(job(kind)))


def train_on(rank: int, world: int, port: int, source: dict[str, Any], root: str, steps: int) -> dict[str, Any]:
    """Resumes from the newest checkpoint, if there is one, and saves another if any step was taken.

    Returns:
        The step of that checkpoint, the optimizer state as loaded and at the end, and the weights,
        all unsharded; the events.
    """
    job, reported = parse_job(source), CollectingReporter()
    seat = seat_of(rank, world, port, job)
    store = DirectoryStore(Path(root))
    with assemble(decide(job), seat, hang_timeout_s=60, tell=reported.event) as made:
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
        announcements = Announcements(made.rendezvous, 1)
        saver = CheckpointSaver(store, job.name, {}, seat, announcements, reported, 9, commit_timeout_s=60)
        if steps:
            saver.save(done + steps, built.modules, optimizer, {"data_position": loader.position()})
            assert saver.wait() == done + steps
        saver.close()
        weights = {name: whole(p) for module in built.modules for name, p in module.named_parameters()}
        after = state()
        dist.barrier()  # rank 0 serves the announcements: it leaves when all have connected
    events = [(event.kind, event.message) for event in reported.events]
    return {"resumed": done, "loaded": before, "state": after, "weights": weights, "events": events}


@pytest.mark.parametrize("kind", thinned(OPTIMIZERS, ["muon"]))
def test_a_checkpoint_of_two_shards_goes_on_as_one_process(kind: str, tmp_path: Path) -> None:
    run_ranks(2, train_on, job(kind, fsdp=2), str(tmp_path), STEPS - 1)
    (found,) = run_ranks(1, train_on, job(kind), str(tmp_path), 1)
    if OPTIMIZER_KINDS.get(kind).states:
        kept = {name: value for name, value in found["loaded"].items() if not name.endswith("/step")}
        assert any(bool(value.any()) for value in kept.values())
    for name, value in trained(job(kind))["weights"].items():
        assert float((found["weights"][name] - value).norm() / value.norm()) <= 1e-5, name


def test_an_optimizers_state_has_its_parameters_shape(tmp_path: Path) -> None:
    _, (found,) = run_in_turn(1, train_on, [(job("muon"), str(tmp_path), 1)] * 2)
    for name, value in found["loaded"].items():
        parameter, _, key = name.rpartition("/")
        assert key == "step" or value.shape == found["weights"][parameter].shape
        assert isinstance(value, torch.Tensor)
