"""A process that survives a restart keeps its frozen weights: they are not read again."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from local_run import Kill, LocalRun, same
from test_generate import TINY
from training import document, thinned

from raypp.job.load import parse_job
from raypp.job.models import DecoderOptions
from raypp.rank.build import FrozenPart
from raypp.records import Coordinates
from raypp.state.hf.from_hf import hf_options


def on_a_base(mesh: dict[str, int], base: str = str(TINY)) -> dict[str, Any]:
    model = hf_options(DecoderOptions(from_hf=base, lora={"rank": 4, "alpha": 64, "base": "int8"}))
    train = {"steps": 5, "optimizer": {"kind": "adamw", "lr": 1e-2}}
    job = document(name="kept", train=train, checkpoint={"memory_every_steps": 1}, microbatches=4, **mesh)
    return {**job, "model": model.model_dump(mode="json")}


@pytest.mark.parametrize("mesh", thinned([{"fsdp": 2}, {"pp": 2}], [], [{"fsdp": 2}]), ids=str)
def test_the_survivor_keeps_its_base_and_the_run_ends_with_the_same_bits(
    mesh: dict[str, int], tmp_path: Path, shared_memory: Any
) -> None:
    run = LocalRun(on_a_base(mesh), tmp_path / "killed", [shared_memory()] * 2, [0, 0])
    first = run.attempt_once(Kill((1,), after=3), stay=True)
    assert "lost a peer" in first.errors[0], first
    second = run.attempt_once()
    assert "tensors, " in first.of_kind("loaded_from_hf")[0].message
    assert "this rank has kept " in second.of_kind("loaded_from_hf")[0].message
    undisturbed = LocalRun(on_a_base(mesh), tmp_path / "undisturbed", [shared_memory()] * 2, [0, 0])
    assert second.losses == undisturbed.attempt_once().losses
    assert same(run.final_state(), undisturbed.final_state())


def test_weights_are_kept_only_for_the_same_base_cut_and_place(tmp_path: Path) -> None:
    for file in TINY.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    job = parse_job(on_a_base({"pp": 2}, str(tmp_path)))

    def part(place: Coordinates, layers: range = range(2), lr: float = 1e-2) -> FrozenPart | None:
        optimizer = job.train.optimizer.model_copy(update={"lr": lr})
        changed = job.model_copy(update={"train": job.train.model_copy(update={"optimizer": optimizer})})
        return FrozenPart.of(changed, [layers], place, "cpu")

    place = Coordinates(pp=1)
    before = part(place)
    assert before == part(replace(place, dp_replicate=1)) == part(place, lr=0.5) != part(Coordinates())
    assert before != part(place, layers=range(1, 3))
    (weights,) = tmp_path.glob("*.safetensors")
    os.utime(weights, (1, 1))
    assert before != part(place)
