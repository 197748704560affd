"""Sums over replicas beside the last backward: exact ones change no bit, int8 ones lose nothing."""

from pathlib import Path
from typing import Any

import pytest
import torch
from comparison import assert_identical
from harness import run_in_turn, run_ranks
from local_run import Kill, LocalRun, same
from training import document, merged, on_ranks, seat_of, thinned, train_steps, trained

from raypp import ports
from raypp.job.load import parse_job
from raypp.planning.decide import decide
from raypp.planning.schedules.action import Kind
from raypp.planning.schedules.communication import MessageKind
from raypp.rank.assemble import assemble
from raypp.rank.fault_injection import VARIABLE
from raypp.rank.step.step import StepRunner
from raypp.stages.parallel import apply
from raypp.stages.parallel.replica_sums import ReplicaSums
from raypp.stages.parallel.shard import local_part
from raypp.stages.pipeline.planned_stage import PlannedStage
from raypp.stages.pipeline.runtime import ProgramRuntime
from raypp.state.checkpoint.load_checkpoint import load_checkpoint
from raypp.state.checkpoint.state import RESIDUAL, slice_of
from raypp.storage import open_store

INT8 = {"sync": {"kind": "int8"}}
SETTINGS: dict[str, dict[str, Any]] = {
    "pp 2, dp 2": {"pp": 2},
    "dp 4": {"dp_replicate": 4},
    "dp 2, fsdp 2": {"fsdp": 2, "microbatches": 16},
    "pp 2, dp 2, virtual stages": {"pp": 2, "schedule": "interleaved_1f1b", "pipeline": {"stages_per_rank": 2}},
    "pp 2, dp 2, zero bubble": {"pp": 2, "schedule": "zbv", "pipeline": {"stages_per_rank": 2}},
    "pp 2, dp 2, tied": {"pp": 2, "model": {"tie_embeddings": True}},
    "dp 2, fsdp 2, weights freed": {"fsdp": 2, "microbatches": 16, "reshard_after_forward": True},
    "pp 2, dp 2, bf16": {"pp": 2, "train": {"precision": "bf16"}},
    "pp 2, dp 2, adapters": {"pp": 2, "model": {"lora": {"rank": 4, "base": "fp32"}}},
}
QUICK = ("pp 2, dp 2, zero bubble",)


def case(name: str, **train: Any) -> dict[str, Any]:
    settings = {"dp_replicate": 2, **SETTINGS[name]}
    return document(**{**settings, "train": {**settings.get("train", {}), **train}})


SQUARE = case("pp 2, dp 2")


def beside_after_and_by_fsdp(
    rank: int, world: int, port: int, ports: list[int], job: dict[str, Any]
) -> list[dict[str, Any]]:
    """Trains with sums beside the backward, with each sum awaited at once, and with FSDP's own."""
    found = [train_steps(rank, world, ports[0], job, 2)]
    begin, take = ReplicaSums.__init__, apply._replica_sums

    def at_once(self: ReplicaSums, stage: Any, *, int8: bool, late: bool) -> None:
        begin(self, stage, int8=int8, late=False)

    try:
        ReplicaSums.__init__ = at_once  # type: ignore[method-assign]
        found.append(train_steps(rank, world, ports[1], job, 2))
        apply._replica_sums = lambda *_: None
        found.append(train_steps(rank, world, ports[2], job, 2))
    finally:
        ReplicaSums.__init__, apply._replica_sums = begin, take  # type: ignore[method-assign]
    return found


@pytest.mark.parametrize("name", thinned([*SETTINGS][:-1], [], QUICK))
def test_exact_sums_beside_the_backward_have_the_bits_of_those_awaited_after_it(name: str) -> None:
    for beside, after, by_fsdp in run_ranks(4, beside_after_and_by_fsdp, ports.free_ports(3), case(name)):
        assert_identical(beside, after)
        assert_identical(beside, by_fsdp)


def of_each_kind(rank: int, world: int, port: int, ports: list[int]) -> list[dict[str, Any]]:
    """Trains with exact sums, sums in int8, and outer steps of two fragments."""
    outer = {"kind": "outer", "every_steps": 4, "fragments": 2, "overlap_steps": 1}
    jobs = [document(dp_replicate=2, train={"steps": 4, "sync": sync}) for sync in ({}, INT8["sync"], outer)]
    return [train_steps(rank, world, free, job, 4) for free, job in zip(ports, jobs, strict=True)]


def test_a_report_has_the_bytes_that_are_sent_to_other_replicas() -> None:
    """Two replicas send each other every number once, in fp32 or in about a byte. The last outer
    step sends all, after the fragment that is under way. Apart, a replica reports its own bytes."""
    found, _ = run_ranks(2, of_each_kind, ports.free_ports(3))
    numbers = sum(weight.numel() for weight in found[0]["weights"].values())
    exact, int8, outer = ([count / (4 * numbers) for count in kind["replica_bytes"]] for kind in found)
    assert exact == [2.0] * 4 and int8 == pytest.approx([2 * 260 / 256 / 4] * 4, rel=1e-3)
    assert outer == pytest.approx([0, 0.5, 0, 1.5], rel=0.1)
    assert trained(document(microbatches=2))["replica_bytes"] == [None] * 3


def test_a_microbatch_for_each_replica_gives_the_bits_of_one_process() -> None:
    # Two numbers have one sum, whichever comes first: more microbatches are added in other pairs.
    one = trained(document(microbatches=2))
    for rank in on_ranks(document(dp_replicate=2, microbatches=2)):
        assert_identical(rank, one)


def sums_under_way(rank: int, world: int, port: int, job: dict[str, Any]) -> list[tuple[str, int]]:
    """Returns how many sums are in flight after each last backward and each send, in one step."""
    seen: list[tuple[str, int]] = []
    backward, send = ProgramRuntime._backward, PlannedStage.send

    def note(self: Any, what: str) -> None:
        runs = self.planned.values() if isinstance(self, ProgramRuntime) else [self]
        seen.append((what, sum(stage.replica_sums.under_way for stage in runs)))

    def after_backward(self: ProgramRuntime, kind: Kind, stage: PlannedStage, microbatch: int) -> None:
        backward(self, kind, stage, microbatch)
        note(self, f"{stage.stage_index}B{microbatch}")

    def after_send(self: PlannedStage, kind: MessageKind, microbatch: int) -> Any:
        work = send(self, kind, microbatch)
        if kind == "B":
            note(self, f"{self.stage_index}SEND{microbatch}")
        return work

    ProgramRuntime._backward, PlannedStage.send = after_backward, after_send  # type: ignore[method-assign]
    train_steps(rank, world, port, job, 1)
    return seen


def test_sums_begin_within_the_last_backward_unless_a_gradient_is_still_to_be_sent() -> None:
    first, _, last, _ = run_ranks(4, sums_under_way, SQUARE)
    assert [count for _, count in first[:-1]] == [0] * (len(first) - 1)
    name, count = first[-1]
    assert name == "0B3" and count > 1, "the first stage's blocks are summed in its last backward"
    assert [count for _, count in last] == [0] * len(last), "the last stage first sends its last gradient"
    assert last[-1][0] == "1SEND3"


# int8


@pytest.mark.parametrize("name", thinned(SETTINGS, QUICK))
def test_replicas_stay_equal_to_the_bit_and_near_the_exact_sums(name: str) -> None:
    int8, exact = (on_ranks(case(name, sync={"kind": kind})) for kind in ("int8", "exact"))
    weights: dict[str, torch.Tensor] = {}
    for one in int8:
        assert one["loss"] == int8[0]["loss"] and one["grad_norm"] == int8[0]["grad_norm"]
        for key, value in one["weights"].items():
            assert torch.equal(weights.setdefault(key, value), value), key
    ours, theirs = merged(int8), merged(exact)
    assert ours["loss"][0] == theirs["loss"][0], "the first step's loss does not depend on its sums"
    changed = 0
    for key, value in theirs["gradients"][0].items():
        error = (ours["gradients"][0][key] - value).norm() / value.norm().clamp(min=1e-12)
        # 0.023 for the gain of a norm, which shares the scales of blocks with matrices.
        assert error < 0.04, key
        changed += bool(error > 0)
    assert changed, "nothing was quantised"


def residuals(rank: int, world: int, port: int, job: dict[str, Any], steps: int) -> list[dict[str, torch.Tensor]]:
    """Trains; returns for each block its own gradients, what was delivered, and what is left."""
    found: dict[int, dict[str, torch.Tensor]] = {}
    started: list[dict[str, torch.Tensor]] = []
    begin, wait, keep = ReplicaSums._in_int8, ReplicaSums.wait, ReplicaSums.keep_residuals

    def note_own(self: ReplicaSums, flat: Any, gradient: torch.Tensor) -> Any:
        zero = torch.zeros(gradient.numel(), dtype=torch.float64)
        one = found.setdefault(id(flat), {"own": zero.clone(), "sum": zero.clone()})
        one["own"] += gradient
        started.append(one)
        return begin(self, flat, gradient)

    def note_sum(self: ReplicaSums) -> None:
        under_way = list(self._under_way)
        wait(self)
        for one, finish in zip(started, under_way, strict=True):
            one["sum"] += finish.args[1]
        started.clear()

    def note_left(self: ReplicaSums) -> None:
        keep(self)
        for flat in self._flats:
            assert flat.residual is not None
            found[id(flat)]["left"] = flat.residual.double()

    ReplicaSums._in_int8, ReplicaSums.wait, ReplicaSums.keep_residuals = note_own, note_sum, note_left  # type: ignore[method-assign]
    train_steps(rank, world, port, job, steps)
    return list(found.values())


def test_what_rounding_takes_arrives_in_later_steps() -> None:
    ranks = run_ranks(2, residuals, document(dp_replicate=2, microbatches=4, train=INT8), 6)
    assert len(ranks[0]) == len(ranks[1]) == 5, "four blocks, and both ends of the model"
    for one, other in zip(*ranks, strict=True):
        assert torch.equal(one["sum"], other["sum"])
        wanted, left = one["own"] + other["own"], one["left"] + other["left"]
        assert (one["sum"] + left - wanted).norm() <= 1e-5 * wanted.norm()
        assert (one["sum"] - wanted).norm() > 100 * (one["sum"] + left - wanted).norm(), "nothing was rounded"


def places(rank: int, world: int, port: int, job: dict[str, Any]) -> list[tuple[str, int, int, int]]:
    """Returns where each parameter's gradient lies in what FSDP reduced, and its residual in it."""
    found: list[tuple[str, int, int, int]] = []
    update = StepRunner.update

    def look(self: StepRunner, *arguments: Any) -> None:
        for stage in self.built.modules:
            parts = getattr(stage, "replica_residuals").parts  # noqa: B009
            trained = {name: p for name, p in stage.named_parameters() if p.requires_grad}
            assert parts.keys() == trained.keys()
            for name, parameter in trained.items():
                own, other = local_part(parameter.grad), local_part(parts[name])
                if own.numel():
                    found.append((name, own.storage_offset(), other.storage_offset(), own.numel() - other.numel()))
        update(self, *arguments)

    StepRunner.update = look  # type: ignore[method-assign]
    train_steps(rank, world, port, job, 1)
    return found


@pytest.mark.slow
def test_a_residual_lies_where_the_gradient_of_its_parameter_does() -> None:
    uneven = {**SQUARE["model"], "ffn_size": 51, "num_kv_heads": 1, "head_dim": 6, "lora": {"rank": 3, "base": "fp32"}}
    sharded = document(dp_replicate=2, fsdp=3, microbatches=12, train=INT8)
    jobs = {6: [sharded, {**sharded, "model": uneven}], 4: [case("pp 2, dp 2, tied", **INT8)]}
    for world, cases in jobs.items():
        for ranks in run_in_turn(world, places, [(job,) for job in cases]):
            for one in ranks:
                assert len(one) > 10
                for name, gradient, residual, difference in one:
                    assert (residual, difference) == (gradient, 0), name


def life(root: Path, faults: str = "", job: dict[str, Any] | None = None) -> LocalRun:
    """A run of eight steps that saves every third one."""
    made = job or case("pp 2, dp 2", **INT8, steps=8)
    made = {**made, "checkpoint": {"every_steps": 3, "memory_tier": False, "keep": 9}}
    return LocalRun(made, root / "store", [root / "memory"] * 4, [0] * 4, {VARIABLE: faults})


@pytest.mark.gate
def test_a_run_whose_save_is_killed_resumes_bit_for_bit(tmp_path: Path) -> None:
    straight = life(tmp_path / "straight")
    reported = straight.attempt_once()
    assert not reported.errors
    # The upload begins in a thread, in the step that was saved or in the next.
    killed = life(tmp_path / "killed", "kill@upload:rank=3,step=6; kill@upload:rank=3,step=7")
    broken = killed.attempt_once()
    assert broken.errors, "no rank was killed"
    resumed = killed.attempt_once()
    assert not resumed.errors
    assert resumed.of_kind("resumed")[-1].step == 3, "the save of step 6 was killed; that of step 3 is whole"
    after = range(4, 9)
    assert [resumed.losses[step] for step in after] == [reported.losses[step] for step in after]
    expected, found = straight.final_state(), killed.final_state()
    assert same(found, expected)
    held = [key for key in expected if f"/{RESIDUAL}" in key]
    assert {key.rpartition(".")[2] for key in held} == {"0", "1"}, "each replica saves its own"
    assert sum(bool(expected[key].any()) for key in held) > len(held) // 2


@pytest.mark.slow
def test_a_run_that_is_killed_resumes_from_memory_bit_for_bit(tmp_path: Path, shared_memory: Any) -> None:
    job = {**case("pp 2, dp 2", **INT8, steps=5), "checkpoint": {"every_steps": 0}}
    straight = LocalRun(job, tmp_path / "straight", [shared_memory() for r in range(4)], [0, 1, 2, 3])
    reported = straight.attempt_once()
    assert not reported.errors
    killed = LocalRun(job, tmp_path / "killed", [shared_memory() for r in range(4)], [0, 1, 2, 3])
    killed.attempt_once(Kill((1,), after=3))
    resumed = killed.attempt_once()
    assert not resumed.errors and "memory" in resumed.of_kind("restored")[-1].details["source"]
    assert same(killed.final_state(), straight.final_state())


@pytest.mark.gate
def test_residuals_are_cut_anew_for_another_mesh_and_their_sum_stays(tmp_path: Path) -> None:
    job = case("dp 4", **INT8, steps=2)
    first = life(tmp_path, job=job)
    assert not first.attempt_once().errors
    before = first.final_state()
    shapes = {
        "four": {"mesh": {"pp": 2, "dp_replicate": 2}, "pipeline": {**job["pipeline"], "microbatches": 4}},
        "sharded": {"mesh": {"dp_replicate": 2, "fsdp": 2}, "pipeline": {**job["pipeline"], "microbatches": 2}},
    }
    for shape in shapes.values():
        other = {**job, **shape, "checkpoint": {"url": str(tmp_path / "store"), "memory_tier": False}}
        found = run_ranks(4, loaded_residuals, other)
        totals: dict[str, torch.Tensor] = {}
        for one in found:
            for name, (total, offset, whole) in one["parts"].items():
                full = totals.setdefault(name, torch.zeros(whole))
                full[tuple(slice(o, o + n) for o, n in zip(offset, total.shape, strict=True))] += total
        for name, total in totals.items():
            saved = sum(before[f"optim/{name}/{RESIDUAL}{replica}"].double() for replica in range(4))
            assert torch.allclose(total.double(), saved, rtol=1e-5, atol=1e-9), name
        assert totals.keys() == {key.split("/")[1] for key in before if f"/{RESIDUAL}" in key}
        assert "those of 4 replicas go to 2" in found[0]["remark"]


def loaded_residuals(rank: int, world: int, port: int, job: dict[str, Any]) -> dict[str, Any]:
    """Loads the newest checkpoint; returns this rank's residuals with their places."""
    parsed = parse_job(job)
    with assemble(decide(parsed), seat_of(rank, world, port, parsed), hang_timeout_s=60) as made:
        store = open_store(parsed.checkpoint.url)
        loaded = load_checkpoint(store, parsed.name, None, made.built.modules, made.optimizer)
        assert loaded is not None
        parts = {}
        for module in made.built.modules:
            for name, value in getattr(module, "replica_residuals").parts.items():  # noqa: B009
                part = slice_of(name, value)
                parts[name] = (part.tensor.clone(), part.offset, part.global_shape)
        return {"parts": parts, "remark": loaded.remark}


@pytest.mark.slow
def test_exact_sums_drop_the_residuals_and_say_so(tmp_path: Path) -> None:
    job = case("pp 2, dp 2", **INT8, steps=2)
    first = life(tmp_path, job=job)
    assert not first.attempt_once().errors
    job["train"] = {**job["train"], "sync": {"kind": "exact"}, "steps": 4}
    second = life(tmp_path, job=job)
    second.attempt = 1
    reported = second.attempt_once()
    assert reported.of_kind("resumed")[-1].step == 2 and reported.steps[-1] == 4
    (said,) = reported.of_kind("sync")
    assert "the residuals of 2 replicas" in said.message and "dropped" in said.message
    job["train"] = {**job["train"], **INT8, "steps": 6}
    third = life(tmp_path, job=job)
    third.attempt = 2
    reported = third.attempt_once()
    assert "they begin at zero" in reported.of_kind("sync")[-1].message


def skipped_step(rank: int, world: int, port: int, job: dict[str, Any]) -> list[bool]:
    """Trains three steps, the second with NaN gradients; returns whether residuals changed."""
    changed: list[bool] = []
    run = StepRunner.run

    def watched(self: StepRunner, step: int, *rest: Any) -> Any:
        held = [flat for sums in self.built.replica_sums for flat in sums._flats if flat.residual is not None]
        before = [flat.residual.clone() for flat in held if flat.residual is not None]
        if step == 2:
            original = self.reducer.gradients

            def poisoned() -> list[torch.Tensor]:
                found = original()
                found[0].fill_(float("nan"))
                return found

            self.reducer.gradients = poisoned  # type: ignore[method-assign]
        else:
            self.reducer.__dict__.pop("gradients", None)
        report = run(self, step, *rest)
        changed.append(any(not torch.equal(a, b.residual) for a, b in zip(before, held, strict=True)))
        return report

    StepRunner.run = watched  # type: ignore[method-assign]
    train_steps(rank, world, port, job, 3)
    return changed


def test_a_step_that_is_not_applied_leaves_the_residuals_as_they_were() -> None:
    job = document(dp_replicate=2, microbatches=4, train=INT8)
    assert run_ranks(2, skipped_step, job) == [[True, False, True]] * 2
