"""Evaluation: the same loss on every mesh, and training none the wiser."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import run_ranks
from test_mesh_does_not_change_numbers import document
from training import seat_of

from raypp.checkpoint.load import load_checkpoint
from raypp.data.loader import open_loader
from raypp.models.stage import build_stage
from raypp.parallel.context import WholeRows
from raypp.pipeline.collate import IGNORED, collate
from raypp.records import Event, Requests, StepReport
from raypp.spec.load import parse_job
from raypp.storage.directory import DirectoryStore
from raypp.train.rank import run_rank

pytestmark = pytest.mark.ranks
STEPS = 3


def evaluated(url: str = "", every: int = 2, **settings: Any) -> dict[str, Any]:
    replicas = settings.get("fsdp", 1) * settings.get("dp_replicate", 1) * settings.pop("fewer", 1)
    train = settings.pop("train", {})
    found = document(microbatches=4 // replicas, train={"eval_every_steps": every, **train}, **settings)
    found["model"]["num_layers"] = 4
    found["data"] |= {"num_documents": 120, "eval": {"fraction": 0.2}}
    found["checkpoint"] = {"url": url, "every_steps": 0}
    return found


class Listener:
    """Keeps what a rank tells."""

    def __init__(self) -> None:
        self.reports: list[StepReport] = []
        self.events: list[Event] = []
        self.phases: set[str] = set()

    def phase(self, name: str, detail: str = "") -> None:
        self.phases.add(name)

    def step(self, report: StepReport) -> None:
        self.reports.append(report)

    def event(self, event: Event) -> None:
        self.events.append(event)

    def requests(self) -> Requests:
        return Requests()


def live(rank: int, world: int, port: int, source: dict[str, Any]) -> dict[str, Any]:
    job, listener = parse_job(source), Listener()
    run_rank(job, seat_of(rank, world, port, job), listener)
    return {
        "numbers": [(r.loss, r.grad_norm, r.tokens, r.seq_len) for r in listener.reports],
        "evaluations": [(e.step, e.details) for e in listener.events if e.kind == "evaluated"],
        "phases": sorted(listener.phases),
    }


@cache
def run_of(settings: tuple[tuple[str, Any], ...] = (), world: int = 1, every: int = 2) -> dict[str, Any]:
    """What rank 0 of a whole run told, and the weights it ended with."""
    with TemporaryDirectory() as url:
        source = evaluated(url, every, **{key: dict(v) if isinstance(v, tuple) else v for key, v in settings})
        results = run_ranks(world, live, source)
        job = parse_job(source)
        whole = build_stage(job.model, range(job.model.num_layers), first=True, last=True).to_empty(device="cpu")
        load_checkpoint(DirectoryStore(Path(url)), job.name, None, [whole], None)
    assert not any(result["evaluations"] for result in results[1:])
    assert every == 0 or all("evaluate" in result["phases"] for result in results)
    return {**results[0], "weights": dict(whole.named_parameters())}


def losses(found: dict[str, Any]) -> list[tuple[int, float, int]]:
    return [(step, details["loss"], details["tokens"]) for step, details in found["evaluations"]]


def test_a_run_with_evaluation_has_the_bits_of_one_without() -> None:
    for settings, world in (((), 1), ((("fsdp", 2),), 2)):
        with_it, without = run_of(settings, world), run_of(settings, world, 0)
        assert [step for step, _, _ in losses(with_it)] == [2, 3] and not losses(without)
        assert with_it["numbers"] == without["numbers"]
        assert all(torch.equal(with_it["weights"][name], value) for name, value in without["weights"].items())


def test_the_loss_is_the_mean_over_all_held_out_tokens() -> None:
    found, job = run_of(), parse_job(evaluated())
    whole = build_stage(job.model, range(job.model.num_layers), first=True, last=True).to_empty(device="cpu")
    whole.load_state_dict({name: value.detach() for name, value in found["weights"].items()})
    loader = open_loader(job, 0, 1)
    total, tokens, rows = 0.0, 0, 0
    for microbatches in loader.held_out():
        for microbatch in microbatches:
            for row in microbatch.rows:
                batch = collate([row], len(row.tokens), torch.device("cpu"), WholeRows())
                with torch.no_grad():
                    logits = whole(batch.tokens_BT, batch.positions_BT, batch.documents)
                total += float(F.cross_entropy(logits[0], batch.labels_BT[0], ignore_index=IGNORED, reduction="sum"))
                tokens += int((batch.labels_BT != IGNORED).sum())
                rows += 1
    assert rows == 16  # two steps; the last rows of the second have no label
    step, loss, counted = losses(found)[-1]
    assert (step, counted) == (3, tokens)
    assert loss == pytest.approx(total / tokens, rel=1e-6)


VIRTUAL = (("stages_per_rank", 2),)


@pytest.mark.parametrize(
    "settings",
    [
        (("pp", 2),),
        (("pp", 3), ("schedule", "gpipe")),
        (("pp", 2), ("schedule", "interleaved_1f1b"), ("pipeline", VIRTUAL)),
        (("pp", 2), ("schedule", "zbv"), ("pipeline", VIRTUAL)),
        (("pp", 2), ("train", (("activation_checkpointing", "full"),))),
    ],
    ids=["1f1b", "gpipe", "interleaved", "V", "recomputed"],
)
def test_every_pipeline_finds_the_bits_of_one_process(settings: tuple[tuple[str, Any], ...]) -> None:
    found = run_of(settings, world=dict(settings)["pp"])
    assert losses(found) == losses(run_of())
    assert found["numbers"] == run_of()["numbers"]


@pytest.mark.parametrize(
    "settings",
    [(("fsdp", 2),), (("pp", 2), ("fsdp", 2)), (("pp", 2), ("dp_replicate", 2))],
    ids=["fsdp", "pp and fsdp", "pp and dp_replicate"],
)
def test_replicas_share_the_held_out_part_and_find_the_same_within_1e5(settings: tuple[tuple[str, Any], ...]) -> None:
    world = 1
    for _, size in settings:
        world *= size
    for ours, theirs in zip(losses(run_of(settings, world)), losses(run_of()), strict=True):
        assert (ours[0], ours[2]) == (theirs[0], theirs[2])
        assert ours[1] == pytest.approx(theirs[1], rel=1e-5)
