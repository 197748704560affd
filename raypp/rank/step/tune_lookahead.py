"""`pipeline.lookahead: auto`: times the first steps, then chooses one warm-up depth for all ranks.

Steps 2 and 3 of an attempt are timed action by action. Before step 4 the channels are timed, each
alone and then all at once. One `all_reduce(MAX)` gives every rank the slowest replica's figures and
the least memory; all run the same simulation on them. No depth changes a bit.

Legend: S stages.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from raypp.planning.choose_lookahead import Depth, best_depth, cards_and_links, depths
from raypp.planning.decision import ResolvedPipeline
from raypp.planning.schedules.simulate import Simulator, StageTimes
from raypp.rank.assemble import AssembledRank
from raypp.records import Event
from raypp.stages.pipeline.device_clock import ActionClock
from raypp.stages.pipeline.link_probe import Channel, Channels
from raypp.stages.pipeline.wire import wire_format

_TIMED = (2, 3)
"""The steps of an attempt that are timed. The first allocates, connects and compiles: not timed."""
_MOST_SPREAD = 0.3
"""Actions vary more than this only while something else disturbs the machine."""
_LINK_SPREAD = 0.15
"""By what fraction a message's time varies where cards are shared: TCP's shares are not equal."""
_SHARE = 0.8
"""Share of the free memory for activations; the rest is for temporary buffers of the compute."""


@dataclass(frozen=True)
class Choice:
    """The measurements and the choice; the same on every rank. `candidates`: the depths that fit
    into memory, with their simulated steps. `free`: the depth to use if memory were unlimited.
    `most_in_flight`: microbatches that fit into memory, per stage. `wire`: seconds of a message
    between each stage and the next while its cards carry no other."""

    times: StageTimes
    candidates: Sequence[Depth]
    best: Depth
    free: Depth
    most_in_flight: Sequence[int]
    wire: Sequence[float]
    crowded: Sequence[float]

    def words(self) -> str:
        """Returns the choice and its reason, in one line."""
        borders = range(len(self.times.forward) - 1)
        border = max(borders, key=lambda b: self.times.message(b) / max(self.times.forward[b], 1e-9))
        queue = f", {_seconds(self.crowded[border])} while its cards carry others," if self.times.cards else ""
        measured = (
            f"link {_seconds(self.wire[border])} per message{queue} against "
            f"{_seconds(self.times.forward[border])} forward and "
            f"{_seconds(self.times.backward[border])} backward between stage {border} and {border + 1}"
        )
        now, classic = self.best, self.candidates[0]
        if now.lookahead:
            gain = f"a step of {_seconds(now.step_s)} by simulation, {_seconds(classic.step_s)} with 0"
        elif len(self.candidates) == 1 and self.free.lookahead == 0:
            gain = "this schedule has no deeper warm-up"
        else:
            gain = "a deeper warm-up does not pay off"
        if self.free.lookahead > now.lookahead:
            gain += f"; {self.free.lookahead} needs more memory"
        return f"lookahead {now.lookahead}: {measured}; {gain}"

    def event(self, step: int, attempt: int) -> Event:
        """Returns the `lookahead` event for the run's records."""
        return Event("lookahead", self.words(), attempt=attempt, step=step, details=self.details())

    def details(self) -> dict[str, Any]:
        """Returns the measurements as JSON data, for the event."""
        return {
            "lookahead": self.best.lookahead,
            "forward_s": [round(t, 6) for t in self.times.forward],
            "backward_s": [round(t, 6) for t in self.times.backward],
            "link_s": [round(self.times.message(b), 6) for b in range(len(self.times.forward) - 1)],
            "wire_s": [round(seconds, 6) for seconds in self.wire],
            "crowded_s": [round(seconds, 6) for seconds in self.crowded],
            "cards": None if self.times.cards is None else list(self.times.cards),
            "spread": round(self.times.spread, 3),
            "step_s": {depth.lookahead: round(depth.step_s, 6) for depth in self.candidates},
            "most_in_flight": list(self.most_in_flight),
        }


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 0.1 else f"{value * 1e3:.3g} ms"


class LookaheadTuner:
    """Times the first steps, then switches the runtime's program. Every rank of the mesh has one.
    `rank`: this rank; `pipeline.lookahead` is auto and the mesh has more than one pipeline rank."""

    def __init__(self, rank: AssembledRank) -> None:
        self._rank, self.job, self.pipeline = rank, rank.job, rank.pipeline
        self.runtime = rank.built.runtime
        self._steps = 0
        self._clock = ActionClock(rank.device)
        self._tokens = 0

    def before_step(self, own_lengths: Sequence[int]) -> Choice | None:
        """Call once before each step, on all ranks. Collective before the fourth: over the world,
        or over the replica if it trains apart. `own_lengths`: tokens of a row in each of the step's
        microbatches, on this rank. Returns the choice, before the fourth step; None otherwise."""
        self._steps += 1
        self.runtime.clock = self._clock if self._steps in _TIMED else None
        self._tokens = max(self._tokens, max(own_lengths) * self.job.train.micro_batch_size)
        if self._steps != _TIMED[-1] + 1:
            return None
        figures, memory = self._gathered()
        choice = choose(self.pipeline, figures, self._rank.decision.depths_within(memory))
        if choice.best.lookahead:
            self.runtime.load(self.pipeline.program_with(choice.best.lookahead))
        return choice

    def _gathered(self) -> tuple[list[float], int]:
        """Returns the maximum of all ranks' figures, `[8 · S]` in the order `choose` takes them.
        Also the bytes of the smallest device; 0 on a CPU, whose memory is what is free."""
        stages, ranks = self.pipeline.num_stages, self.pipeline.rank_of_stage
        figures = torch.zeros(9, stages, dtype=torch.float64)
        figures[6:] = -float("inf")
        device = self._rank.device
        figures[8] = -torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0
        for (kind, stage), seconds in self._clock.medians().items():
            if kind == "F":
                figures[0, stage] = seconds
        for stage, backward in self._clock.backwards().items():
            figures[1:3, stage] = torch.tensor(backward)
        for (source, to), channel in self._channels().items():
            for border in range(stages - 1):
                if {ranks[border], ranks[border + 1]} == {source, to}:
                    figures[3, border] = max(float(figures[3, border]), channel.wire_s)
                    figures[4, border] = max(float(figures[4, border]), channel.crowded_s)
        figures[5] = self._clock.spread()
        place, replica = self._rank.groups.coordinates, self._rank.groups.replica
        if replica is not None:
            place = replace(place, dp_replicate=0)
        for stage, fits in self._room().items():
            if not any(place.column):  # the other replicas are placed alike
                figures[6, stage] = self._rank.seat.node_rank
            figures[7, stage] = -fits
        dist.all_reduce(figures, op=dist.ReduceOp.MAX, group=replica)
        return [float(number) for number in figures[:8].flatten()], -int(figures[8, 0])

    def _channels(self) -> dict[tuple[int, int], Channel]:
        wire, shape = self.pipeline.wire, (1, self._tokens, self.job.model.hidden_size)
        formats = wire_format(wire.activations), wire_format(wire.gradients)
        size = max(form.buffer(shape, torch.device("meta")).nbytes for form in formats)
        groups, ranks, device = self._rank.groups, self.pipeline.rank_of_stage, self._rank.device
        barrier = partial(dist.barrier, groups.replica)
        channels = Channels(groups.coordinates.pp, ranks, groups.forward, groups.backward, device)
        return channels.time(size, barrier)

    def _room(self) -> dict[int, int]:
        """Returns how many microbatches fit, per stage, if its stages share free memory equally."""
        rank = self._rank
        free = _SHARE * free_bytes(rank.device, rank.seat.local_world_size) / len(self.runtime.planned)
        room = {}
        for stage in self.runtime.planned:
            computed = self._tokens * rank.decision.activation_bytes[stage]
            room[stage] = int(free // max(1, self._clock.kept_bytes(stage) or computed))
        return room


def choose(
    pipeline: ResolvedPipeline, figures: Sequence[float], fits: Callable[[int, Simulator], bool] | None = None
) -> Choice:
    """Chooses the depth from the measurements of all ranks; depends on its arguments alone.
    `figures`: `[8 · S]`, eight groups of one number per stage: seconds of a forward, of a backward,
    of its input half (0: backwards are not split), of a message to the next stage alone, of one
    among all others; by what fraction actions vary; the node; and minus the number of microbatches
    that fit into memory. `fits`: whether a depth fits into memory by plan, too
    (`Decision.depths_within`)."""
    stages, ranks = pipeline.num_stages, pipeline.rank_of_stage
    forward, backward, inputs, wire, crowded, spread, node, memory = (
        figures[i * stages : (i + 1) * stages] for i in range(8)
    )
    nodes = {rank: int(node[stage]) for stage, rank in enumerate(ranks)}
    cards, links = cards_and_links(ranks, [nodes[rank] for rank in sorted(nodes)], wire, crowded)
    # The first stage's backward is all W: its input needs no gradient.
    share = sum(inputs[1:]) / max(sum(backward[1:]), 1e-12)
    times = StageTimes(
        list(forward),
        list(backward),
        share or 0.5,
        links,
        first_whole=True,
        cards=cards,
        spread=min(_MOST_SPREAD, statistics.median(spread)),
        link_spread=_LINK_SPREAD if cards else 0.0,
    )
    most = [int(-number) for number in memory]
    candidates = depths(pipeline.simulator, pipeline.microbatches, times, most, fits)
    unbounded = depths(pipeline.simulator, pipeline.microbatches, times)
    chosen, free = best_depth(candidates), best_depth(unbounded)
    return Choice(times, candidates, chosen, free, most, list(wire[:-1]), list(crowded[:-1]))


def free_bytes(device: torch.device, sharers: int) -> float:
    """Returns the memory this rank can still use: of its GPU, or its share of the host's."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return float(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    free = int(psutil.virtual_memory().available)
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and (bound := limit.read_text().strip()) != "max":
        free = min(free, int(bound) - int(used.read_text()))
    return max(0, free) / sharers
