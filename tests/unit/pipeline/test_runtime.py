"""The runtime carries out every schedule: which rank waits for what, what is freed, what is summed.

Each rank is a thread with stages that multiply by a number. Their messages are what gloo's are: a
send is done when the other end has received it, and the receives of a channel meet its sends in
order.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from threading import Condition
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from raypp.planning.schedules.action import Program, splits_backward
from raypp.planning.schedules.catalogue import SCHEDULES, build_forward_only, build_program, schedule_named
from raypp.planning.seating import place_stages
from raypp.stages.pipeline import runtime
from raypp.stages.pipeline.runtime import ProgramRuntime

MICROBATCHES = 8
HANG_S = 120.0
Key = tuple[str, int, int]
"""A message: F or B, the stage that sends it, the microbatch."""


class World:
    """The messages between the ranks, and what each rank did.

    Attributes:
        log: What each rank did, in order: `F`, `B`, `I`, `W`, `send` or `reduce`, and the stage.
        marks: The marks of each rank.
    """

    def __init__(self, ranks: list[int]) -> None:
        self.rank_of_stage, self.changed, self.broken = ranks, Condition(), False
        self.values: dict[Key, Tensor] = {}
        self.sent: dict[tuple[int, int], list[Key]] = defaultdict(list)
        self.posted: dict[tuple[int, int], list[Key]] = defaultdict(list)
        self.log: dict[int, list[tuple[str, int]]] = defaultdict(list)
        self.marks: dict[int, list[str]] = defaultdict(list)
        self.timed: Counter[tuple[str, int, bool]] = Counter()

    def channel(self, key: Key) -> tuple[int, int]:
        kind, stage, _ = key
        return self.rank_of_stage[stage], self.rank_of_stage[stage + (1 if kind == "F" else -1)]

    def tell(self, reported: dict[Any, Any] | list[Key], *what: Any) -> None:
        with self.changed:
            reported.append(*what) if isinstance(reported, list) else reported.__setitem__(*what)
            self.changed.notify_all()

    def wait_for(self, what: Any) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.broken or what(), HANG_S), "a hang"
            assert not self.broken, "another rank failed"


class Sent:
    def __init__(self, world: World, key: Key) -> None:
        self.world, self.key = world, key

    def wait(self) -> None:
        self.world.wait_for(lambda: self.key in self.world.posted[self.world.channel(self.key)])


class Received:
    """A receive that was posted; `rank` waits for it under a mark that says so."""

    def __init__(self, world: World, key: Key, rank: int) -> None:
        self.world, self.key, self.rank = world, key, rank

    def wait(self) -> None:
        assert self.world.marks[self.rank][-1].endswith(" waits")
        self.world.wait_for(lambda: self.key in self.world.values)


class Sharded(FSDPModule, nn.Identity):
    """A module as FSDP leaves it, which knows only where its weights are.

    Attributes:
        gathered: They are gathered, or on their way.
        awaited: They have arrived: a forward and a whole backward wait for them in hooks.
        summed: How often a weight backward added its gradients to FSDP's sum.
    """

    gathered = awaited = False
    summed = 0

    @classmethod
    def made(cls) -> Any:
        module = nn.Identity()
        module.__class__ = cls
        return module

    def unshard(self, async_op: bool = False) -> None:
        self.gathered, self.awaited = True, self.awaited or not async_op

    def reshard(self) -> None:
        self.gathered = self.awaited = False


class Stage:
    """Multiplies by its weight; what `PlannedStage` has that the runtime uses."""

    replica_sums = None
    frees_weights = reduces_each = False
    below_trains = True
    device = torch.device("cpu")

    def __init__(self, world: World, index: int, *, replicated: bool) -> None:
        self.world, self.stage_index, self.group_rank = world, index, world.rank_of_stage[index]
        self.is_first, self.is_last = index == 0, index == len(world.rank_of_stage) - 1
        self.replicated = self.sums_beside = replicated
        self.submod = Sharded.made()
        self.submod.stage_index, self.submod.block = index, Sharded.made()
        self.weight, self.gradient = float(index + 2), 0.0

    def plan(self, rows: int, seq_lens: list[int], *, backward: bool, step: int, split: Any = ()) -> None:
        self.shapes = [(rows, length, 1) for length in seq_lens]
        self.received: dict[int, Tensor] = {}
        self.received_grads: dict[int, Tensor] = {}
        self.fwd_cache: dict[int, Any] = {}
        self.bwd_cache: dict[int, Any] = {}
        self.later: dict[int, Tensor] = {}
        self.gradient = 0.0
        for module in self.submod.modules():
            module.summed = 0

    def did(self, kind: str, microbatch: int) -> None:
        log = self.world.log[self.group_rank]
        log.append((kind, self.stage_index))
        if kind in "FBIW":
            name = f"{self.stage_index}{kind}{microbatch}"
            assert self.world.marks[self.group_rank][-1] == name, "a rank that computes says that it waits"
            modules = list(self.submod.modules())
            assert all(module.gathered for module in modules), "the weights are not there"

    def forward_one_chunk(self, microbatch: int, inputs: tuple[Tensor, ...], kwargs: Any, **_: bool) -> Tensor:
        self.did("F", microbatch)
        given = inputs[0] if self.is_first else self.received.pop(microbatch)
        output = given * self.weight
        self.fwd_cache[microbatch] = ((output,), [given])
        return output

    def backward_one_chunk(self, microbatch: int, *, loss: Tensor | None, full_backward: bool, **_: bool) -> None:
        self.did("B" if full_backward else "I", microbatch)
        gradient = torch.ones(()) if self.is_last else self.received_grads.pop(microbatch)
        assert (loss is None) == (not self.is_last)
        _, (given,) = self.fwd_cache.pop(microbatch)
        self.bwd_cache[microbatch] = (gradient * self.weight,)
        self.later[microbatch] = gradient * given
        if full_backward:
            self.gradient += float(self.later.pop(microbatch))

    def backward_weight_one_chunk(self, microbatch: int, **_: bool) -> None:
        self.did("W", microbatch)
        self.gradient += float(self.later.pop(microbatch))

    def perform_reduce_grad(self, factor: int) -> None:
        self.did("reduce", -1)

    def set_local_fwd_input(self, output: Tensor, microbatch: int) -> None:
        self.received[microbatch] = output

    def set_local_bwd_input(self, gradients: tuple[Tensor], microbatch: int) -> None:
        (self.received_grads[microbatch],) = gradients

    def get_local_bwd_output(self, microbatch: int) -> tuple[Tensor]:
        return self.bwd_cache.pop(microbatch)

    def send(self, kind: str, microbatch: int) -> Sent:
        value = self.fwd_cache[microbatch][0][0] if kind == "F" else self.bwd_cache.pop(microbatch)[0]
        key = (kind, self.stage_index, microbatch)
        self.did("send", microbatch)
        self.world.sent[self.world.channel(key)].append(key)
        self.world.tell(self.world.values, key, value)
        return Sent(self.world, key)

    def receive(self, kind: str, microbatch: int, after: Any = None) -> Received:
        key = (kind, self.stage_index + (-1 if kind == "F" else 1), microbatch)
        self.world.tell(self.world.posted[self.world.channel(key)], key)
        return Received(self.world, key, self.group_rank)

    def unpack(self, kind: str, microbatch: int) -> None:
        received, source = (self.received, -1) if kind == "F" else (self.received_grads, 1)
        received[microbatch] = self.world.values[kind, self.stage_index + source, microbatch]


class Clock:
    def __init__(self, timed: Counter[tuple[str, int, bool]]) -> None:
        self.counts = timed

    @contextmanager
    def timed(self, kind: str, stage: int, *, message: bool = False) -> Iterator[None]:
        self.counts[kind, stage, message] += 1
        yield


class Offload:
    """Knows which program it was told."""

    def __init__(self) -> None:
        self.reported: Any = None

    def load(self, program: Any) -> None:
        self.reported = program

    def plan(self) -> None: ...

    def forward(self, *_: Any) -> Any:
        return nullcontext()

    backward = forward


class Pipeline:
    def __init__(
        self, name: str, ranks: int, *, each: int = 2, replicated: bool = False, backward: bool = True
    ) -> None:
        kind = schedule_named(name)
        self.each, self.ranks, self.name, self.placement = kind.nearest_stages(each), ranks, name, kind.placement
        placed = place_stages(ranks, ranks * self.each, kind.placement)
        holder = {stage: rank for rank, stages in enumerate(placed) for stage in stages}
        self.world = World([holder[stage] for stage in range(ranks * self.each)])
        self.stages = {
            stage: Stage(self.world, stage, replicated=replicated) for stages in placed for stage in sorted(stages)
        }
        self.program = self.of(0) if backward else build_forward_only(ranks, self.each, MICROBATCHES, self.placement)
        self.runtimes = []
        for rank in range(ranks):
            own: Any = [stage for stage in self.stages.values() if stage.group_rank == rank]
            offload: Any = Offload()
            one = ProgramRuntime(
                own, self.program, self.world.rank_of_stage, MICROBATCHES, lambda output, target: output,
                self.world.marks[rank].append, backward=backward, offload=offload,
            )  # fmt: skip
            clock: Any = Clock(self.world.timed)
            one.clock = clock
            self.runtimes.append(one)

    def of(self, lookahead: int) -> Program:
        return build_program(self.name, self.ranks, self.each, MICROBATCHES, lookahead)

    def load(self, program: Program) -> None:
        self.program = program
        for one in self.runtimes:
            one.load(program)

    def run(self) -> list[float]:
        for some in (self.world.values, self.world.sent, self.world.posted, self.world.log, self.world.timed):
            some.clear()
        inputs = [torch.tensor(float(microbatch + 1)) for microbatch in range(MICROBATCHES)]

        def run_rank(rank: int) -> list[Tensor]:
            try:
                return self.runtimes[rank].run(1, [1] * MICROBATCHES, inputs, [{}] * MICROBATCHES, inputs)
            except BaseException:
                self.world.broken = True
                self.world.tell([], ("failed", rank, 0))
                raise

        with ThreadPoolExecutor(self.ranks) as pool:
            *_, losses = sorted(pool.map(run_rank, range(self.ranks)), key=len)
        return [float(loss) for loss in losses]


@pytest.fixture(autouse=True)
def sums_of_weight_backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    def add(module: Any) -> None:
        module.summed += 1

    monkeypatch.setattr(runtime, "add_to_sums", add)


def check_numbers(pipeline: Pipeline, losses: list[float]) -> None:
    """Checks the losses of a step, the gradients, and that nothing is left of it."""
    weights = [stage.weight for stage in pipeline.stages.values()]
    assert losses == [(microbatch + 1) * math.prod(weights) for microbatch in range(MICROBATCHES)]
    inputs = sum(range(1, MICROBATCHES + 1))
    for stage in pipeline.stages.values():
        assert stage.gradient == inputs * math.prod(weights) / stage.weight
        halves = sum(a.stage == stage.stage_index and a.kind == "W" for a in pipeline.program[stage.group_rank])
        assert {module.summed for module in stage.submod.modules()} == {halves}
        assert not (stage.fwd_cache or stage.bwd_cache or stage.received or stage.received_grads or stage.later)
    world = pipeline.world
    assert world.posted == world.sent, "the receives of a channel meet its sends in order"


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", SCHEDULES.names())
def test_a_step_computes_every_gradient_and_sums_each_stage_once(name: str, ranks: int) -> None:
    if ranks == 1 and schedule_named(name).nearest_stages(2) == 1:
        pytest.skip("one stage")
    pipeline = Pipeline(name, ranks)
    check_numbers(pipeline, pipeline.run())
    for rank, log in pipeline.world.log.items():
        reduced = Counter(stage for kind, stage in log if kind == "reduce")
        assert reduced == {stage.stage_index: 1 for stage in pipeline.stages.values() if stage.group_rank == rank}
        for stage in reduced:
            *_, (last, _) = [entry for entry in log if entry[1] == stage and entry[0] != "send"]
            assert last == "reduce"
    kinds = {(kind, stage) for kind, stage, message in pipeline.world.timed if not message}
    assert {(kind, stage) for kind, stage, message in pipeline.world.timed if message} <= kinds
    assert splits_backward(pipeline.program) == any(kind == "W" for kind, _ in kinds)


def test_a_part_of_a_backward_waits_for_weights_that_its_stage_has_just_fetched_again() -> None:
    pipeline = Pipeline("interleaved_zero_bubble", 2, each=5)
    check_numbers(pipeline, pipeline.run())


@pytest.mark.parametrize("name", SCHEDULES.names())
def test_sums_over_replicas_begin_after_the_last_gradient_and_the_last_message(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = Pipeline(name, 4, replicated=True)
    log = pipeline.world.log
    monkeypatch.setattr(
        runtime, "reduce_within_backward",
        lambda module, loss, **_: pipeline.stages[module.stage_index].did("sums within", -1),
    )  # fmt: skip
    check_numbers(pipeline, pipeline.run())
    for rank, done in log.items():
        for stage in [stage for stage, one in pipeline.stages.items() if one.group_rank == rank]:
            own = [kind for kind, of in done if of == stage]
            assert own.count("reduce") == 1
            if "sums within" in own:
                assert own[own.index("sums within") + 1 :] in (["B", "reduce"], ["B", "send", "reduce"])
                begun = done.index(("sums within", stage))
                assert not any(kind == "send" for kind, of in done[begun:]), "the cable is not free"
            else:
                assert not any(kind == "send" for kind, _ in done[done.index(("reduce", stage)) :])


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("name", SCHEDULES.names())
def test_a_forward_only_step_frees_everything_and_the_gathered_weights(name: str, ranks: int) -> None:
    pipeline = Pipeline(name, ranks, backward=False)
    losses = pipeline.run()
    assert losses == [(m + 1) * math.prod(one.weight for one in pipeline.stages.values()) for m in range(MICROBATCHES)]
    for stage in pipeline.stages.values():
        assert not any(module.gathered for module in stage.submod.modules()), "the next step would compute with these"
        assert not (stage.fwd_cache or stage.received)


def test_a_new_program_is_followed_from_the_next_step_on() -> None:
    pipeline = Pipeline("1f1b", 4)
    for lookahead in (0, 2, 1):
        pipeline.load(pipeline.of(lookahead))
        check_numbers(pipeline, pipeline.run())
        for rank, one in enumerate(pipeline.runtimes):
            computed = [f"{stage}{kind}" for kind, stage in pipeline.world.log[rank] if kind in "FB"]
            assert computed == [f"{action.stage}{action.kind}" for action in pipeline.program[rank]]
            reported: Any = one.offload
            assert reported.reported == pipeline.program[rank]
