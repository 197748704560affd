"""Evaluation gives the same loss on every mesh and does not affect training."""

import shutil
import time
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from collecting_reporter import CollectingReporter
from harness import run_in_living, run_in_turn, run_ranks
from training import document, seat_of, thinned

from raypp.job.load import parse_job
from raypp.planning.decide import decide
from raypp.rank.data.loader import open_loader
from raypp.rank.joining.lost_peer import LostPeerError
from raypp.rank.rank import run_rank
from raypp.rank.step.collate import collate
from raypp.records import Event, Requests
from raypp.stages.models.loss import IGNORED
from raypp.stages.models.stage import build_stage
from raypp.stages.parallel.context import WholeRows
from raypp.stages.parallel.rank_groups import before_abort
from raypp.state.checkpoint.layout import commit_key
from raypp.state.checkpoint.load_checkpoint import load_checkpoint
from raypp.state.run_records.recorder import RunRecorder
from raypp.storage.directory import DirectoryStore

STEPS = 3


def evaluated(*, every: int = 2, **settings: Any) -> dict[str, Any]:
    train = {"eval_every_steps": every, **settings.pop("train", {})}
    found = document(microbatches=4, train=train, **settings)
    found["data"] |= {"num_documents": 120, "eval": {"fraction": 0.2}}
    return found


def lived(rank: int, world: int, port: int, source: dict[str, Any]) -> tuple[dict[str, Any], torch.nn.Module | None]:
    """Runs a complete training. Returns the reports and, on rank 0, the final weights, and the
    model with them, as loaded from the store."""
    job, reported = parse_job(source), CollectingReporter()
    run_rank(decide(job), seat_of(rank, world, port, job), reported)
    found: dict[str, Any] = {
        "numbers": [(r.loss, r.grad_norm, r.tokens, r.seq_len, r.extras) for r in reported.reports],
        "evaluations": [(e.step, e.details) for e in reported.events if e.kind == "evaluated"],
        "unused": [e.message for e in reported.events if e.kind == "data" and "not trained on" in e.message],
        "samples": [(e.step, e.details["samples"]) for e in reported.events if e.kind == "sampled"],
        "phases": reported.phases,
    }
    if rank > 0:
        return found, None
    whole = build_stage(job.model, range(job.model.num_layers), first=True, last=True).to_empty(device="cpu")
    load_checkpoint(DirectoryStore(Path(job.checkpoint.url)), job.name, None, [whole], None)
    return {**found, "weights": {name: value.detach() for name, value in whole.named_parameters()}}, whole


def live(rank: int, world: int, port: int, source: dict[str, Any]) -> dict[str, Any]:
    return lived(rank, world, port, source)[0]


class AbortsDuring(CollectingReporter):
    """Marks the communicators as aborted, as soon as the rank is in a phase."""

    def __init__(self, phase: str) -> None:
        super().__init__()
        self._fatal = phase

    def phase(self, name: str, detail: str = "", reached: object = None) -> None:
        super().phase(name, detail)
        if name == self._fatal:
            before_abort()


def aborted(rank: int, world: int, port: int, source: dict[str, Any], during: str) -> list[str]:
    """Returns the kinds of the events that a rank reports whose communicators are aborted."""
    job, reported = parse_job(source), AbortsDuring(during)
    with pytest.raises(LostPeerError):
        run_rank(decide(job), seat_of(rank, world, port, job), reported)
    return [event.kind for event in reported.events]


class EndsAfterSaving(AbortsDuring):
    """Aborts in the first evaluation, once the checkpoint of its step is committed."""

    def __init__(self, source: dict[str, Any], step: int) -> None:
        super().__init__("evaluate")
        self._store, self._key = DirectoryStore(Path(source["checkpoint"]["url"])), commit_key(source["name"], step)

    def phase(self, name: str, detail: str = "", reached: object = None) -> None:
        while name == "evaluate" and self._store.head(self._key) is None:
            time.sleep(0.01)
        super().phase(name, detail)


class Records(CollectingReporter):
    """Writes events to the run's records, too; may request a stop."""

    def __init__(self, source: dict[str, Any], attempt: int, stop: bool) -> None:
        super().__init__(lambda asked: Requests(stop=stop))
        self.recorder = RunRecorder(DirectoryStore(Path(source["checkpoint"]["url"])), source["name"], f"a{attempt}")

    def event(self, event: Event) -> None:
        super().event(event)
        self.recorder.event(event)


def interrupted(rank: int, world: int, port: int, source: dict[str, Any], step: int) -> list[int]:
    job, reported = parse_job(source), EndsAfterSaving(source, step)
    with pytest.raises(LostPeerError):
        run_rank(decide(job), seat_of(rank, world, port, job), reported)
    return [report.step for report in reported.reports]


def resumed(rank: int, world: int, port: int, source: dict[str, Any], attempt: int, stop: bool) -> list[Any]:
    """Returns the kind, the step and the values of what was evaluated and sampled."""
    job, reported = parse_job(source), Records(source, attempt, stop)
    run_rank(decide(job), seat_of(rank, world, port, job), reported)
    reported.recorder.close()
    found = [event for event in reported.events if event.kind in ("evaluated", "sampled")]
    return [(one.kind, one.step, one.details.get("loss")) for one in found]


VIRTUAL = {"stages_per_rank": 2}
PIPELINES: dict[str, dict[str, Any]] = {
    "1f1b": {"pp": 2},
    "gpipe": {"pp": 3, "schedule": "gpipe"},
    "interleaved": {"pp": 2, "schedule": "interleaved_1f1b", "pipeline": VIRTUAL},
    "V": {"pp": 2, "schedule": "zbv", "pipeline": VIRTUAL},
    "recomputed": {"pp": 2, "train": {"activation_checkpointing": "full"}},
}
REPLICAS: dict[str, dict[str, Any]] = {
    "fsdp": {"fsdp": 2},
    "cp": {"cp": 2},
    "ulysses": {"cp": 2, "cp_style": "ulysses"},
    "pp and fsdp": {"pp": 2, "fsdp": 2},
    "pp and dp_replicate": {"pp": 2, "dp_replicate": 2},
    "pp and cp": {"pp": 2, "cp": 2},
}
WITH_EXPERTS: dict[str, dict[str, Any]] = {
    "one with experts": {},
    "experts, pp": {"pp": 2},
    "experts, ep": {"fsdp": 2, "ep": 2},
    "experts, pp and ep": {"pp": 2, "fsdp": 2, "ep": 2},
    "experts, pp and ep over cp": {"pp": 2, "cp": 2, "ep": 2},
}
SPREAD = [name for name, mesh in WITH_EXPERTS.items() if "ep" in mesh]
QUIET = ("one", "fsdp", "cp", "pp and cp", *WITH_EXPERTS)
"""Runs that also run without evaluation."""
EXPERTS = {
    "kind": "qwen3_moe", "num_experts": 6, "experts_per_token": 2, "expert_ffn_size": 24, "aux_loss_weight": 0.02,
    "z_loss_weight": 0.01,
}  # fmt: skip


def source_of(name: str, every: int = 2) -> dict[str, Any]:
    settings = {**PIPELINES, **REPLICAS, **WITH_EXPERTS, "one": {}}[name]
    return evaluated(every=every, model=EXPERTS if name in WITH_EXPERTS else {}, **settings)


def world_of(source: dict[str, Any]) -> int:
    return parse_job(source).mesh.world


@cache
def run_of(name: str = "one", every: int = 2) -> dict[str, Any]:
    source = source_of(name, every)
    with TemporaryDirectory() as folder:
        source["checkpoint"] = {"url": folder, "every_steps": 0}
        results = run_in_living(world_of(source), ("evaluated", str(source["mesh"])), live, source)
    assert not any(result["evaluations"] or result["unused"] for result in results[1:])
    (unused,) = results[0]["unused"]
    assert unused.endswith(" are held out")
    assert all(("evaluate" in result["phases"]) == bool(every) for result in results)
    return results[0]


def losses(found: dict[str, Any]) -> list[tuple[int, float, int]]:
    return [(step, details["loss"], details["tokens"]) for step, details in found["evaluations"]]


@pytest.mark.parametrize("name", thinned(QUIET, ["one", "fsdp"], ["experts, ep"]))
def test_a_run_with_evaluation_has_the_bits_of_one_without(name: str) -> None:
    with_it, without = run_of(name), run_of(name, 0)
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
                batch = collate([row], len(row.tokens), WholeRows())
                with torch.no_grad():
                    logits = whole(batch.tokens_BT, batch.positions_BT, batch.documents)
                total += float(F.cross_entropy(logits[0], batch.labels_BT[0], ignore_index=IGNORED, reduction="sum"))
                tokens += int((batch.labels_BT != IGNORED).sum())
                rows += 1
    assert rows == 16  # two steps; the last rows of the second step have no labels
    step, loss, counted = losses(found)[-1]
    assert (step, counted) == (3, tokens)
    assert loss == pytest.approx(total / tokens, rel=1e-6)


def reference_of(name: str) -> dict[str, Any]:
    return run_of("one with experts" if name in WITH_EXPERTS else "one")


@pytest.mark.parametrize("name", thinned([*PIPELINES, "experts, pp"], ["V"], ["interleaved"]))
def test_every_pipeline_finds_the_bits_of_one_process(name: str) -> None:
    assert losses(run_of(name)) == losses(reference_of(name))
    assert run_of(name)["numbers"] == reference_of(name)["numbers"]


@pytest.mark.parametrize("name", thinned([*REPLICAS, *SPREAD], ["fsdp", "cp"], ["pp and cp", "experts, ep"]))
def test_replicas_share_the_held_out_part_and_find_the_same_within_1e5(name: str) -> None:
    for ours, theirs in zip(losses(run_of(name)), losses(reference_of(name)), strict=True):
        assert (ours[0], ours[2]) == (theirs[0], theirs[2])
        assert ours[1] == pytest.approx(theirs[1], rel=1e-5)


def test_what_a_failure_interrupts_is_made_up_once_and_also_after_the_last_step(tmp_path: Path) -> None:
    sample = {"every_steps": 2, "prompts": ["ab"], "max_new_tokens": 2}
    checkpoint = {"url": str(tmp_path), "every_steps": 2, "memory_tier": False}
    source = evaluated(pp=2, train={"sample": sample}, model={"vocab_size": 257}, checkpoint=checkpoint)
    assert run_ranks(2, interrupted, source, 2)[0] == [1, 2]
    lives = [(source, 2, True), (source, 3, False), (source, 4, False)]
    stopped, found, known = (first for first, _ in run_in_turn(2, resumed, lives))
    assert not stopped, "an operator who stops a run does not wait for it"
    kinds = [("evaluated", 2), ("sampled", 2), ("evaluated", 3), ("sampled", 3)]
    assert [(kind, step) for kind, step, _ in found] == kinds and not known, "nothing is missing of a whole run"
    shutil.rmtree(tmp_path / source["name"] / "events")
    assert run_ranks(2, resumed, source, 5, False)[0] == found[2:], "no step is left"


def test_after_an_abort_no_loss_is_reported(tmp_path: Path) -> None:
    source = evaluated() | {"checkpoint": {"url": str(tmp_path)}}
    (kinds,) = run_ranks(1, aborted, source, "evaluate")
    assert "evaluated" not in kinds
