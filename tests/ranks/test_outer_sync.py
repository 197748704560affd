"""Replicas that train apart: the bits of a reference, also after restarts and on other meshes."""

import pickle
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import run_ranks
from local_run import AttemptReports, Kill, LocalRun, same, snapshots_keep_up
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from training import Changed, document, seat_of, thinned, without_labels

from raypp import ports
from raypp.job.load import parse_job
from raypp.rank.data.loader import Loader, Microbatch, open_loader
from raypp.rank.fault_injection import VARIABLE
from raypp.rank.step import resume
from raypp.rank.step.step import StepRunner
from raypp.records import AXES, Coordinates
from raypp.stages.parallel.outer_sync import OuterSync, fragments_of
from raypp.state.checkpoint.save import CheckpointSaver
from raypp.state.checkpoint.state import OF_REPLICA, OUTER_MOMENTUM, OWN_WEIGHT, RESIDUAL
from raypp.tools.parity import train_some_steps, whole

Weights = dict[str, torch.Tensor]
EVERY = 2


def outer(
    *,
    lr: float = 0.7,
    momentum: float = 0.9,
    every: int = EVERY,
    compression: str = "none",
    fragments: int = 1,
    overlap: int = 0,
    **more: Any,
) -> dict[str, Any]:
    sync = {
        "kind": "outer", "every_steps": every, "lr": lr, "momentum": momentum, "compression": compression,
        "fragments": fragments, "overlap_steps": overlap,
    }  # fmt: skip
    return {"sync": sync, **more}


def two_replicas(*, checkpoint: dict[str, Any] | None = None, **train: Any) -> dict[str, Any]:
    found = document(dp_replicate=2, microbatches=4, train=outer(**train))
    return {**found, "checkpoint": checkpoint or {"every_steps": 0, "memory_tier": False}}


def weights_of(runner: StepRunner) -> Weights:
    return {name: whole(p) for module in runner.built.modules for name, p in module.named_parameters()}


def train(
    rank: int,
    world: int,
    port: int,
    job: dict[str, Any],
    steps: int,
    wrap: Callable[[Loader, int], Any] = lambda loader, replica: loader,
    before: Callable[[int, StepRunner], None] = lambda step, runner: None,
) -> list[Weights]:
    parsed, found = parse_job(job), []
    ends: list[Weights] = []

    def look(step: int, runner: StepRunner) -> None:
        if step > 1:
            found.append(weights_of(runner))
        before(step, runner)

    def keep(name: str, tensors: Weights) -> None:
        if name == "weights":
            ends.append(tensors)

    train_some_steps(parsed, seat_of(rank, world, port, parsed), steps, keep, wrap=wrap, before=look)
    return [*found, *ends]


# The outer step


def reference(rank: int, world: int, port: int, alone: list[int], job: dict[str, Any], steps: int) -> list[Weights]:
    """Returns a replica's weights after each step: one process trains on its rows, and takes the
    outer steps of all fragments in a few lines."""
    two, one = parse_job(job), {**job, "mesh": {}, "train": {**job["train"], "sync": {"kind": "exact"}}}
    sync, store = two.train.sync, TCPStore("127.0.0.1", port, world, rank == 0)
    labelled = [0]

    def counted(step: list[Microbatch]) -> list[Microbatch]:
        labelled.append(sum(int((row.labels != -100).sum()) for one in step for row in one.rows))
        return step

    loader = Changed(open_loader(two, rank, world), counted)
    agreed: Weights = {}
    momentum: Weights = {}
    since: dict[int, int] = {}
    sent: dict[int, list[Any]] = {}
    after: list[Weights] = []
    ends = {"lm_head.weight": 4, "model.embed_tokens.weight": 5, "model.norm.weight": 6}

    def everyone(key: str, value: Any) -> list[Any]:
        store.set(f"{key}/{rank}", pickle.dumps(value))
        return [pickle.loads(store.get(f"{key}/{replica}")) for replica in range(world)]

    def outer_steps(step: int, runner: StepRunner) -> None:
        named = {name: p.data for module in runner.built.modules for name, p in module.named_parameters()}

        def due(number: int, at: int) -> bool:
            return at % sync.every_steps == number * sync.every_steps // sync.fragments

        def send(number: int) -> None:
            names = [n for n in named if (ends[n] if n in ends else int(n.split(".")[2])) % sync.fragments == number]
            tokens = sum(labelled[since.get(number, 0) + 1 : step + 1])
            sent[number] = everyone(f"{step}/{number}", (tokens, {name: named[name].clone() for name in names}))
            since[number] = step

        def receive(number: int) -> None:
            counts, weights = zip(*sent.pop(number), strict=True)
            for name in weights[rank] if sum(counts) else ():
                old = agreed[name].double()
                mean = sum(n * one[name].double() for n, one in zip(counts, weights, strict=True)) / sum(counts)
                change = old - mean.float().double()
                momentum[name] = (0.9 * momentum.get(name, torch.zeros_like(old)).double() + change).float()
                agreed[name] = (old - 0.7 * (change + 0.9 * momentum[name].double())).float()
                named[name].copy_(agreed[name] + (named[name] - weights[rank][name]))

        for number in range(sync.fragments) if step else ():
            last = step == two.train.steps
            if number in sent and (last or due(number, step)):
                receive(number)
            if last or due(number, step + sync.overlap_steps):
                send(number)
            if number in sent and (last or due(number, step)):
                receive(number)
        if step:
            after.append({name: p.clone() for name, p in named.items()})
        else:
            agreed.update({name: p.clone() for name, p in named.items()})

    train(0, 1, alone[rank], one, steps + 1, lambda _, __: loader, lambda step, run: outer_steps(step - 1, run))
    return after


WAYS: dict[str, dict[str, Any]] = {
    "whole": {"every": 2, "steps": 5},
    "fragments": {"every": 4, "fragments": 2, "steps": 9},
    "overlap": {"every": 4, "overlap": 3, "steps": 10},
    "both": {"every": 4, "fragments": 2, "overlap": 1, "steps": 9},
}


@pytest.mark.parametrize("way", thinned(WAYS, ["both"]))
def test_outer_steps_of_adamw_have_the_bits_of_a_reference(way: str) -> None:
    job, steps = two_replicas(**WAYS[way]), WAYS[way]["steps"]
    expected = run_ranks(2, reference, ports.free_ports(2), job, steps)
    found = run_ranks(2, train, job, steps)
    for replica in range(2):
        equal = [same(one, other) for one, other in zip(found[replica], expected[replica], strict=True)]
        assert equal == [True] * steps
    sync = parse_job(job).train.sync
    for step, (one, other) in enumerate(zip(*found, strict=True), start=1):
        fragment = fragments_of(list(one), sync.fragments)
        same_in = {number for name, number in fragment.items() if torch.equal(one[name], other[name])}
        not_in = {number for name, number in fragment.items() if not torch.equal(one[name], other[name])}
        due = {sync.fragment_due(step)} - {None} if not sync.overlap_steps else set()
        assert same_in == (set(range(sync.fragments)) if step == steps else due) and not same_in & not_in


# Every mesh and precision


MIXTURE = {
    "kind": "qwen3_moe", "num_layers": 2, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "ffn_size": 48,
    "vocab_size": 96, "num_experts": 4, "experts_per_token": 2, "expert_ffn_size": 16,
}  # fmt: skip


def case(model: dict[str, Any] | None = None, train: dict[str, Any] | None = None, **mesh: int) -> dict[str, Any]:
    microbatches = 4 * mesh.get("fsdp", 1)
    return document(
        dp_replicate=2, microbatches=microbatches, model=model or {}, train=outer(steps=4, **(train or {})), **mesh
    )


OFFLOAD = {"precision": "bf16", "optimizer": {"kind": "adamw", "lr": 3e-3, "offload": True}}
CASES = {
    "fsdp, bf16, offload": case(fsdp=2, train=OFFLOAD),
    "pp, tied": case(pp=2, model={"tie_embeddings": True}),
    "pp, tied, int4": case(pp=2, model={"tie_embeddings": True}, train={"compression": "int4"}),
    "cp": case(cp=2),
    "experts": case(fsdp=2, ep=2, model=MIXTURE),
    "tp": case(tp=2),
    "muon": case(fsdp=2, train={"optimizer": {"kind": "muon", "lr": 1e-2}}),
    "adapters": case(pp=2, model={"lora": {"rank": 4, "base": "fp32"}}),
}


@pytest.mark.parametrize("name", thinned(CASES, ["fsdp, bf16, offload"], ["pp, tied, int4"]))
def test_replicas_are_equal_after_outer_steps_only(name: str) -> None:
    ranks = run_ranks(4, train, CASES[name], 4)
    each = [
        Coordinates(*place)
        for place in np.ndindex(*(CASES[name]["mesh"].get(axis, 1) for axis in (one.name for one in AXES)))
    ]
    pairs = [(one, other) for one in range(4) for other in range(one) if
             replace(each[one], dp_replicate=0) == replace(each[other], dp_replicate=0)]  # fmt: skip
    assert len(pairs) == 2
    for one, other in pairs:
        equal = [same(a, b) for a, b in zip(ranks[one], ranks[other], strict=True)]
        assert equal == [False, True, False, True]


# Between outer steps


def touch_after(rank: int, last: int, done: Path) -> None:
    """Lets rank 0 make a file when it has done a step."""
    run = StepRunner.run

    def ahead(self: StepRunner, step: int, *rest: Any) -> Any:
        report = run(self, step, *rest)
        if rank == 0 and step == last:
            done.touch()
        return report

    StepRunner.run = ahead  # type: ignore[method-assign]


def apart(rank: int, world: int, port: int, *, done: Path) -> None:
    """Lets the second replica begin its second step when the first has done its third."""
    read = StepRunner.read

    def late(self: StepRunner, *args: Any, **options: Any) -> Any:
        if rank == 1 and self.warm_steps == 1:
            while not done.exists():
                time.sleep(0.005)
        self.warm_steps += 1
        return read(self, *args, **options)

    StepRunner.warm_steps = 0  # type: ignore[attr-defined]
    StepRunner.read = late  # type: ignore[method-assign]
    touch_after(rank, 3, done)


def test_a_replica_waits_for_no_other_between_outer_steps(tmp_path: Path) -> None:
    job = two_replicas(every=4, steps=8, checkpoint={"every_steps": 4, "memory_tier": False})
    reports = []
    for name, prepare in {"straight": None, "apart": partial(apart, done=tmp_path / "done")}.items():
        one = LocalRun(job, tmp_path / name, [tmp_path / "memory"] * 2, [0, 0], prepare=prepare)
        reported = one.attempt_once()
        assert not reported.errors
        assert reported.steps == list(range(1, 9)), "rank 0 reports each step once, in order"
        reports.append((reported.losses, one.final_state()))
    (straight, state), (late, state_of_late) = reports
    assert straight == late and same(state, state_of_late)


def slow_store(rank: int, world: int, port: int, *, done: Path) -> None:
    """Lets the second replica's upload of step 4 end when the first has done step 7."""
    upload = CheckpointSaver._upload

    def slow(self: CheckpointSaver, step: int, *rest: Any) -> Any:
        while rank == 1 and step == 4 and not done.exists():
            time.sleep(0.005)
        return upload(self, step, *rest)

    CheckpointSaver._upload = slow  # type: ignore[method-assign]
    touch_after(rank, 7, done)


def test_a_slow_store_of_one_site_holds_up_no_step_before_the_next_save(tmp_path: Path) -> None:
    job = two_replicas(every=2, steps=8, checkpoint={"every_steps": 4, "memory_tier": False})
    run = LocalRun(job, tmp_path / "store", [tmp_path] * 2, [0, 0], prepare=partial(slow_store, done=tmp_path / "done"))
    reported = run.attempt_once()
    assert not reported.errors and reported.steps == list(range(1, 9))
    assert [event.step for event in reported.of_kind("committed")] == [4, 8]


# Restarts


def local_run(root: Path, store: str, sync: dict[str, Any], steps: int = 8, **mesh: int) -> LocalRun:
    """A run with saves and evaluations after every fourth step."""
    train = {**outer(steps=steps, **sync), "eval_every_steps": 4}
    checkpoint = {"every_steps": 4, "memory_tier": False, "keep": 9}
    made = document(microbatches=4, train=train, checkpoint=checkpoint, **{"dp_replicate": 2, **mesh})
    made["data"]["eval"] = {"fraction": 0.05}
    world = parse_job(made).mesh.world
    return LocalRun(made, root / store, [root / "memory"] * world, [0] * world)


SYNCS: dict[str, dict[str, Any]] = {
    "whole": {"every": 2},
    "int4": {"every": 2, "compression": "int4"},
    "beside": {"every": 4, "fragments": 2, "overlap": 1, "compression": "int8"},
}


@pytest.mark.parametrize("name", thinned(SYNCS, ["beside"], ["int4"]))
def test_a_killed_run_resumes_from_an_outer_step_bit_for_bit_on_another_mesh_of_a_replica(
    tmp_path: Path, name: str
) -> None:
    sync = SYNCS[name]
    straight = local_run(tmp_path, "straight", sync)
    reported = straight.attempt_once()
    assert not reported.errors
    expected = straight.final_state()
    keys = {key.rpartition("/")[2] for key in expected if key.startswith("optim/")}
    assert {OUTER_MOMENTUM, "exp_avg", f"exp_avg{OF_REPLICA}1"} <= keys
    assert (f"{RESIDUAL}1" in keys) == (name != "whole")
    assert ({OWN_WEIGHT, f"{OWN_WEIGHT}{OF_REPLICA}1"} <= keys) == (name == "beside")
    for key, value in expected.items():
        if key.endswith("/exp_avg"):
            assert not torch.equal(value, expected[f"{key}{OF_REPLICA}1"])
        elif f"/{OWN_WEIGHT}" in key:
            assert torch.equal(value, expected[key.removeprefix("optim/").partition("/")[0]]), "not agreed in the end"

    killed = local_run(tmp_path, "killed", sync)
    killed.attempt_once(Kill((1,), after=6, memory=False, commit=4))
    for other in ("alone", "whole"):
        shutil.copytree(tmp_path / "killed", tmp_path / other)
    resumed = go_on(local_run(tmp_path, "killed", sync, pp=2), expected)
    assert [resumed.losses[step] for step in range(5, 9)] == [reported.losses[step] for step in range(5, 9)]
    assert evaluated(resumed) == evaluated(reported)
    alone = go_on(local_run(tmp_path, "alone", sync, dp_replicate=1))
    assert evaluated(alone)[4] == evaluated(reported)[4], "what was evaluated is not what was saved"
    whole = go_on(local_run(tmp_path, "whole", {"every": 4}))
    assert evaluated(whole)[4] == evaluated(reported)[4], "a replica's own weights were evaluated"


def go_on(other: LocalRun, expected: Weights | None = None) -> AttemptReports:
    """Resumes a run that was killed in its first attempt, and compares its end."""
    other.attempt = 1
    reported = other.attempt_once()
    assert not reported.errors
    assert reported.of_kind("resumed")[-1].step == 4
    assert expected is None or same(other.final_state(), expected)
    return reported


FATES = [Kill((1,), after=6, memory=False, commit=4), Kill((0,), after=9, memory=False, commit=8), None]


def live(root: Path, store: str, sync: dict[str, Any], attempt: int, **mesh: int) -> LocalRun:
    """Trains 12 steps with two replicas, of which the second is lost after step 4 and returns after
    step 8. Returns an attempt of three, ended."""
    run = local_run(root, store, sync, 12, **{"dp_replicate": (2, 1, 2)[attempt], **mesh})
    run.attempt = attempt
    reported = run.attempt_once(FATES[attempt])
    assert FATES[attempt] is not None or not reported.errors
    assert [event.step for event in reported.of_kind("resumed")] == ([4 * attempt] if attempt else [])
    words = [event.message for event in reported.of_kind("sync")]
    assert all("replicas that trained apart" in one for one in words) and len(words) == bool(attempt)
    assert reported.steps == list(range(1, reported.steps[-1] + 1)), (
        "a checkpoint's reports of earlier steps come again"
    )
    return run


@pytest.mark.parametrize("name", thinned(SYNCS, [], ["beside"]))
def test_a_run_that_loses_and_regains_a_replica_has_the_same_bits_each_time_and_on_another_mesh(
    tmp_path: Path, name: str
) -> None:
    for attempt in range(3):
        once = live(tmp_path, "once", SYNCS[name], attempt)
        twice = live(tmp_path, "twice", SYNCS[name], attempt, **({"pp": 2} if attempt else {}))
    assert same(once.final_state(), twice.final_state())


@pytest.mark.gate
def test_the_replica_that_is_left_takes_outer_steps_alone_with_the_momentum_of_all(tmp_path: Path) -> None:
    sync = {"every": 4}
    before = live(tmp_path, "run", sync, 0).final_state(4)
    shutil.copytree(tmp_path / "run", tmp_path / "plain")
    after = live(tmp_path, "run", sync, 1).final_state(8)
    plain = local_run(tmp_path, "plain", sync, 12, dp_replicate=1)
    plain.document["train"]["sync"], plain.attempt = {"kind": "exact"}, 1
    plain.attempt_once(FATES[1])
    trained = plain.final_state(8)
    for name, old in before.items():
        if name.startswith("optim/"):
            continue
        momentum, change = f"optim/{name}/{OUTER_MOMENTUM}", old.double() - trained[name].double()
        moved = (0.9 * before[momentum].double() + change).float()
        assert before[momentum].any() and torch.equal(after[momentum], moved)
        assert torch.equal(after[name], (old - 0.7 * (change + 0.9 * moved.double())).float())
    kept = {name: value for name, value in trained.items() if name.startswith("optim/")}
    assert kept and all(torch.equal(value, after[name]) for name, value in kept.items())


def evaluated(reported: AttemptReports) -> dict[int | None, float]:
    return {event.step: event.details["loss"] for event in reported.of_kind("evaluated")}


# Restarts between outer steps


def in_memory(root: Path, name: str, folders: list[Path], sync: dict[str, Any], **mesh: int) -> LocalRun:
    """A run of 16 steps with two outer steps and snapshots in memory, whose rate is constant."""
    rate = {"lr_schedule": {"kind": "constant", "warmup_steps": 0}}
    replicas = mesh.get("dp_replicate", 2)
    train = outer(**{**sync, "every": 8, "steps": 16, **rate})
    checkpoint = {"every_steps": 8, "memory_every_steps": 1}
    job = document(microbatches=12, train=train, checkpoint=checkpoint, **{"dp_replicate": 2, **mesh})
    world = parse_job(job).mesh.world
    return LocalRun(job, root / name, [folders[rank * replicas // world] for rank in range(world)],
                 [rank * replicas // world for rank in range(world)], prepare=snapshots_keep_up)  # fmt: skip


@pytest.mark.parametrize("name", thinned(SYNCS, ["beside"]))
def test_a_killed_rank_costs_the_steps_since_its_newest_snapshot_bit_for_bit(
    tmp_path: Path, shared_memory: Any, name: str
) -> None:
    """The other replica trains on meanwhile, and goes on from a later step."""
    folders = [shared_memory(), shared_memory()]
    straight, killed = (in_memory(tmp_path, one, folders, SYNCS[name]) for one in "ab")
    reported = straight.attempt_once()
    assert not reported.errors
    before = killed.attempt_once(Kill((1,), after=10, commit=8))
    resumed = killed.attempt_once()
    assert not resumed.errors, resumed.errors
    (restored,) = resumed.of_kind("restored")
    assert restored.details["source"] == "memory" and 8 < (restored.step or 0) < 16, restored.message
    assert same(killed.final_state(), straight.final_state()) and not resumed.of_kind("sync")
    assert {**before.losses, **resumed.losses} == reported.losses
    assert resumed.steps[-1] == 16 and resumed.steps == sorted(resumed.steps)


def by_hand(rank: int, world: int, port: int, job: dict[str, Any], replica: int, lost_at: int) -> Weights:
    """Returns a replica's weights after eight steps: it trains on its rows, and when the others are
    lost, in a new process, on all."""
    two = parse_job(job)
    alone = {**job, "mesh": {}, "train": {**job["train"], "sync": {"kind": "exact"}}}
    state: dict[str, Any] = {}

    def named(runner: StepRunner) -> dict[str, Any]:
        return {name: p for module in runner.built.modules for name, p in module.named_parameters()}

    def take(step: int, runner: StepRunner) -> None:
        if step == lost_at + 1:
            state["data"] = runner.loader.position()
            for name, weight in named(runner).items():
                moments = {key: value.clone() for key, value in runner.optimizer.state[weight].items()}
                state[name] = weight.detach().clone(), moments

    def give(step: int, runner: StepRunner) -> None:
        if step == 1:
            runner.loader.seek(state["data"])
            for name, weight in named(runner).items():
                weight.data.copy_(state[name][0])
                runner.optimizer.state[weight].update(state[name][1])

    train(0, 1, port, alone, lost_at + 1, lambda _, __: open_loader(two, replica, 2), take)
    whole = {**alone, "pipeline": {**job["pipeline"], "microbatches": 2 * job["pipeline"]["microbatches"]}}
    return train(0, 1, ports.free_port(), whole, 8 - lost_at, before=give)[-1]


@pytest.mark.parametrize("left", thinned([0, 1], [], [1]))
def test_a_lost_site_costs_the_others_the_steps_since_their_newest_snapshot(
    tmp_path: Path, shared_memory: Any, left: int
) -> None:
    """Then the mean of the replicas that are left has the weights of the one that is."""
    here, lost = shared_memory(), shared_memory()
    sync = {"every": 8, "lr": 1.0, "momentum": 0.0}
    both = in_memory(tmp_path, "run", [here, lost][:: 1 - 2 * left], sync)
    before = both.attempt_once(Kill((1 - left,), after=4))
    for file in lost.iterdir():
        file.unlink()
    one = in_memory(tmp_path, "run", [here], sync, dp_replicate=1)
    one.attempt = 1
    reported = one.attempt_once()
    assert not reported.errors, reported.errors
    (resumed,) = reported.of_kind("resumed")
    assert resumed.step in range(4, 8)
    words = [event.message for event in reported.of_kind("sync")]
    assert words == [f"of 2 replicas that trained apart, 1 go on, with the states of replicas {left}"]
    assert sorted({**before.losses, **reported.losses}) == list(range(1, 17))
    (expected,) = run_ranks(1, by_hand, both.document, left, resumed.step)
    kept = one.final_state(8)
    assert same(expected, {name: value for name, value in kept.items() if not name.startswith("optim/")})
    assert not any(OWN_WEIGHT in name or OF_REPLICA in name for name in kept)


# Failures beside the compute


def fails_on_one(rank: int, world: int, port: int) -> None:
    def failing(*_: Any) -> Iterator[Any]:
        raise RuntimeError("the exchange fails")
        yield

    if rank == 1:
        OuterSync._exchanged = failing  # type: ignore[method-assign]


def never_comes(rank: int, world: int, port: int) -> None:
    if rank == 1:
        OuterSync._exchanged = lambda *_: iter(())  # type: ignore[method-assign, assignment, return-value]


@pytest.mark.parametrize(
    ("prepare", "faults", "errors"),
    [
        (fails_on_one, "", {0: "lost a peer", 1: "RuntimeError: the exchange fails"}),
        (never_comes, "raise@optimizer:rank=0,step=3", {0: "injected", 1: "lost a peer"}),
    ],
    ids=["a thread fails", "a thread waits when its rank fails"],
)
def test_a_failure_ends_an_exchange_beside_the_compute(
    tmp_path: Path, prepare: Callable[[int, int, int], None], faults: str, errors: dict[int, str]
) -> None:
    job = two_replicas(steps=8, every=4, overlap=3)
    run = LocalRun(job, tmp_path / "store", [tmp_path] * 2, [0, 0], {VARIABLE: faults}, prepare=prepare)
    reported = run.attempt_once()
    assert {rank for rank, words in errors.items() if words in reported.errors.get(rank, "")} == {0, 1}, reported.errors
    assert reported.left == []


def blank_second(loader: Loader) -> Changed:
    numbers = count(1)
    return Changed(loader, lambda step: list(map(without_labels, step)) if next(numbers) == 2 else step)


def train_with_hook(rank: int, world: int, port: int, job: dict[str, Any], steps: int) -> list[list[bool]]:
    """Returns by step whether each call of the update's hook saw the weights of its begin."""
    seen: list[list[bool]] = []

    def before(_step: int, runner: StepRunner) -> None:
        begun = weights_of(runner)
        if not seen:
            runner.optimizer.register_step_pre_hook(lambda *_: seen[-1].append(same(begins[-1], weights_of(runner))))
        begins.append({name: weight.clone() for name, weight in begun.items()})
        seen.append([])

    begins: list[Weights] = []
    train(rank, world, port, job, steps, lambda loader, replica: blank_second(loader) if replica else loader, before)
    return seen


def test_an_outer_step_after_a_skipped_update_waits_for_copies_too() -> None:
    """A save or snapshot under way ends before the weights change: it has a hook on the update."""
    job = two_replicas(steps=3, every=1)
    assert run_ranks(2, train_with_hook, job, 3) == [[[True]] * 3] * 2


def draws_others_on_one(rank: int, world: int, port: int) -> None:
    draw = resume.draw_weights

    def drawn(stages: list[torch.nn.Module], job: Any, **which: Any) -> None:
        draw(stages, job, **which)
        stages[0].get_parameter("model.norm.weight").data.add_(1e-6)

    if rank == 1:
        resume.draw_weights = drawn  # type: ignore[assignment]


def test_a_replica_that_begins_with_other_weights_is_refused(tmp_path: Path) -> None:
    job = two_replicas(steps=8, every=4, fragments=2)
    run = LocalRun(job, tmp_path / "store", [tmp_path] * 2, [0, 0], prepare=draws_others_on_one)
    reported = run.attempt_once()
    assert not reported.losses and "differ: model.norm.weight; rank 0" in reported.errors[0] + reported.errors[1]
