"""What a trace says: where each rank's time went, for whom it waited, and what was hidden."""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from raypp.planning.schedules.action import Action
from raypp.planning.schedules.catalogue import check_program
from raypp.planning.schedules.simulate import StageTimes, Timeline, simulate
from raypp.records import Event
from raypp.state.run_records.trace import COMPUTE, RankTrace, Span

ARRIVED_S = 100e-6
"""A wait shorter than this found its message there."""
_MOST_SIMULATED = 100_000


@dataclass(frozen=True)
class Message:
    """A message between two ranks.

    Attributes:
        direction: F: activations. B: gradients.
        send: The span in which it was posted.
        receiver: The rank that waited for it.
        wait: The span of the wait.
    """

    direction: str
    sender: int
    send: Span
    receiver: int
    wait: Span

    @property
    def arrived(self) -> bool:
        """Whether it was there when it was needed."""
        return self.wait.seconds < ARRIVED_S

    @property
    def under_way_s(self) -> float:
        """Seconds that the receiver waited after the message had been sent."""
        return max(0.0, self.wait.end - max(self.wait.begin, self.send.begin))


@dataclass
class RankTimes:
    """Seconds of one rank in all steps of a trace.

    Attributes:
        compute: Forwards and backwards, without waits within them.
        waits_for: Waits until a peer had sent its message, by the peer's rank.
        messages: Waits for messages that were under way.
        under_way: How long weights and sums were under way, waits included.
        parts: The parts of the steps; `pipeline` contains the above.
    """

    trace: RankTrace
    compute: float = 0.0
    waits_for: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    messages: float = 0.0
    gathers: float = 0.0
    sums: float = 0.0
    under_way: float = 0.0
    parts: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    total: float = 0.0


@dataclass(frozen=True)
class Analysis:
    """What a trace says.

    Attributes:
        messages: All messages of which both ends are in the trace.
        step_s: Seconds of each step, from the first rank's begin to the last one's end.
        pipeline_s: The same of the steps' pipelines.
        prediction: The pipeline of a step, simulated with the trace's own times; None where that
            cannot be done.
        error_s: The ranks' times are exact to this.
    """

    ranks: Sequence[RankTimes]
    messages: Sequence[Message]
    step_s: Sequence[float]
    pipeline_s: Sequence[float]
    prediction: Timeline | None
    error_s: float


def analyse(
    ranks: Sequence[RankTrace], link_s: Sequence[float] = (), cards: Sequence[int | None] | None = None
) -> Analysis:
    """Analyses a trace. `link_s`: seconds of a message between each stage and the next, if they
    were measured; the simulation has free links without. `cards`: the network card of every
    pipeline rank, if messages share any."""
    messages = list(messages_of(ranks))
    times = {one.rank: _times_of(one) for one in ranks}
    for message in messages:
        receiver = times[message.receiver]
        receiver.messages += message.under_way_s
        receiver.waits_for[message.sender] += message.wait.seconds - message.under_way_s
    return Analysis(
        ranks=list(times.values()),
        messages=messages,
        step_s=_whole(ranks, "step"),
        pipeline_s=_whole(ranks, "pipeline"),
        prediction=predicted(ranks, link_s, cards),
        error_s=max((one.clock_error_s for one in ranks), default=0.0),
    )


def messages_of(ranks: Iterable[RankTrace]) -> Iterator[Message]:
    """Yields the messages whose send and wait are both in the trace."""
    sends: dict[tuple[object, ...], tuple[int, Span]] = {}
    for one in ranks:
        for span in one.spans:
            if span.kind in ("send F", "send B"):
                sends[*one.coordinates.column, span.kind[-1], span.step, span.stage, span.microbatch] = one.rank, span
    for one in ranks:
        for span in one.spans:
            if span.kind in ("wait F", "wait B"):
                direction = span.kind[-1]
                source = span.stage + (-1 if direction == "F" else 1)
                sent = sends.get((*one.coordinates.column, direction, span.step, source, span.microbatch))
                if sent is not None:
                    yield Message(direction, *sent, one.rank, span)


def _times_of(one: RankTrace) -> RankTimes:
    times = RankTimes(one)
    for span in one.spans:
        match span.kind:
            case "F" | "B" | "I" | "W":
                times.compute += span.seconds
            case "wait gather":
                times.gathers += span.seconds
                times.compute -= span.seconds  # it is within a forward
            case "wait sums":
                times.sums += span.seconds
            case "gathering" | "summing" | "exchanging":
                times.under_way += span.seconds
            case "step":
                times.total += span.seconds
            case kind if " " not in kind and kind not in ("gather", "sum"):
                times.parts[kind] += span.seconds
    times.compute = max(0.0, times.compute)
    return times


def _whole(ranks: Iterable[RankTrace], kind: str) -> list[float]:
    begins: dict[int, float] = {}
    ends: dict[int, float] = {}
    for one in ranks:
        for span in one.spans:
            if span.kind == kind:
                begins[span.step] = min(begins.get(span.step, span.begin), span.begin)
                ends[span.step] = max(ends.get(span.step, span.end), span.end)
    return [ends[step] - begins[step] for step in sorted(begins)]


def predicted(
    ranks: Sequence[RankTrace], link_s: Sequence[float] = (), cards: Sequence[int | None] | None = None
) -> Timeline | None:
    """Simulates the program that the ranks ran, with the median times of their actions. Returns
    None if the trace lacks actions, or they do not form a program that can run."""
    program: dict[int, list[Action]] = {}
    seconds: dict[tuple[str, int], list[float]] = defaultdict(list)
    for one in ranks:
        waits = _gather_waits(one)
        computed = [span for span in one.spans if span.kind in COMPUTE]
        for index, span in enumerate(computed):
            seconds[span.kind, span.stage].append(max(0.0, span.seconds - waits.get((span.step, index), 0.0)))
        last = [Action(s.stage, s.kind, s.microbatch) for s in computed if s.step == computed[-1].step]  # type: ignore[arg-type]
        program.setdefault(one.coordinates.pp, last)
    actions = [action for line in program.values() for action in line]
    if not actions or len(actions) > _MOST_SIMULATED or min(map(len, program.values())) == 0:
        return None
    placement = [sorted({action.stage for action in program[pp]}) for pp in sorted(program)]
    microbatches = 1 + max(action.microbatch for action in actions)
    stages = sum(map(len, placement))
    if min(a.microbatch for a in actions) < 0 or sorted(chain(*placement)) != list(range(stages)):
        return None
    if microbatches > len(actions) or check_program(program, placement, microbatches):
        return None
    times = _stage_times(seconds, stages, link_s)
    if cards is not None and len(cards) == len(program):
        times = replace(times, cards=cards)
    return simulate(program, times)


def _gather_waits(one: RankTrace) -> dict[tuple[int, int], float]:
    """Returns the seconds of waits for weights within each action, by step and action's number."""
    waits: dict[tuple[int, int], float] = defaultdict(float)
    number = 0
    for span in one.spans:
        if span.kind in COMPUTE:
            number += 1
        elif span.kind == "wait gather":
            waits[span.step, number] += span.seconds
    return waits


def _stage_times(seconds: Mapping[tuple[str, int], list[float]], stages: int, link_s: Sequence[float]) -> StageTimes:
    def median(kind: str, stage: int) -> float:
        samples = seconds.get((kind, stage))
        return statistics.median(samples) if samples else 0.0

    inputs = [median("I", stage) for stage in range(stages)]
    weights = [median("W", stage) for stage in range(stages)]
    whole = [median("B", stage) or i + w for stage, i, w in zip(range(stages), inputs, weights, strict=True)]
    split = sum(inputs[1:]) + sum(weights[1:])
    links = list(link_s) if len(link_s) == stages - 1 else [0.0] * max(0, stages - 1)
    share = sum(inputs[1:]) / split if split else 0.5
    return StageTimes([median("F", s) for s in range(stages)], whole, share, links, first_whole=True)


def measured_links(events: Sequence[Event], attempt: int | None = None) -> list[float]:
    """Returns the seconds of a message between stages, as last measured by `lookahead: auto`.
    `attempt`: only in that one."""
    links = _measurement(events, attempt).get("link_s")
    return [float(s) for s in links if isinstance(s, int | float) and 0 <= s < 1e6] if isinstance(links, list) else []


def measured_cards(events: Sequence[Event], attempt: int | None = None) -> list[int | None] | None:
    """Returns the network card of every pipeline rank, as `lookahead: auto` found them last, or in
    an attempt; None where no messages share one."""
    cards = _measurement(events, attempt).get("cards")
    return cards if isinstance(cards, list) and all(card is None or type(card) is int for card in cards) else None


def _measurement(events: Sequence[Event], attempt: int | None) -> Mapping[str, Any]:
    measured = (event for event in reversed(events) if event.kind == "lookahead" and attempt in (None, event.attempt))
    return next((event.details for event in measured), {})
