"""Reports ranks that compute slower than their peers, and loss spikes. Takes no action."""

import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from raypp.planning.decision import ResolvedPipeline
from raypp.planning.geometry import Mesh
from raypp.rank.assemble import AssembledRank
from raypp.records import Event
from raypp.stages.pipeline.device_clock import ActionClock

_EVERY = 5
"""Every how many steps one is timed."""
_IN_A_ROW = 3
_LAST_LOSSES = 20
_FEWEST_LOSSES = 5


@dataclass
class StragglerWatch:
    """Compares the seconds that ranks compute in a step.

    Ranks of one pipeline stage do the same work and are compared with each other. A rank alone in
    its stage is compared with the other stages, each relative to its share of the cut. `work`: work
    of each pipeline rank by the cut, in layers.
    """

    pp_of_rank: Sequence[int]
    work: Sequence[float]
    factor: float
    _slow: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    _reported: set[int] = field(default_factory=set)

    def seen(self, seconds: Sequence[float]) -> list[tuple[int, float]]:
        """Takes the seconds of every rank in a step; 0: not known. Returns ranks that stayed slow,
        and how many times slower they are; each rank once."""
        slow = []
        for rank, ratio in enumerate(self._ratios(seconds)):
            self._slow[rank] = self._slow[rank] + 1 if ratio > self.factor else 0
            if self._slow[rank] >= _IN_A_ROW and rank not in self._reported:
                self._reported.add(rank)
                slow.append((rank, ratio))
        return slow

    def _ratios(self, seconds: Sequence[float]) -> list[float]:
        per_layer = [one / self.work[pp] for one, pp in zip(seconds, self.pp_of_rank, strict=True)]
        timed = [rank for rank, one in enumerate(seconds) if one]
        ratios = []
        for rank, pp in enumerate(self.pp_of_rank):
            others = [other for other in timed if other != rank]
            peers = [other for other in others if self.pp_of_rank[other] == pp] or others
            usual = statistics.median(per_layer[other] for other in peers) if peers else 0.0
            ratios.append(per_layer[rank] / usual if usual > 0 else 0.0)
        return ratios


@dataclass
class SpikeWatch:
    """Detects a loss far above recent ones. `factor`: recovery.spike_factor; None: detects none."""

    factor: float | None
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=_LAST_LOSSES))

    def seen(self, loss: float, *, but_spikes: bool = False) -> float | None:
        """Takes a step's loss, with `but_spikes` only if it is usual; returns the recent median if
        the loss exceeds `factor` times it."""
        usual = statistics.median(self.losses) if len(self.losses) >= _FEWEST_LOSSES else None
        spiked = self.factor is not None and usual is not None and loss > self.factor * usual > 0
        if loss == loss and not (spiked and but_spikes):  # NaN is left out
            self.losses.append(loss)
        return usual if spiked else None

    @staticmethod
    def words(loss: float, usual: float) -> str:
        return f"the loss is {loss:.4f}, {loss / usual:.1f} times the recent median ({usual:.4f})"


class Pace:
    """Times the compute of every fifth step on every rank, and reports stragglers. The seconds
    travel with the collective that starts the next step, each rank's in its own place. `done`: the
    step that the attempt starts from: which steps are timed depends on their numbers, since
    replicas that train apart may start from different ones."""

    def __init__(self, rank: AssembledRank, done: int = 0) -> None:
        self._seat = rank.seat
        mesh = Mesh.of(rank.job.mesh)
        self._labels = mesh.labels()
        self._factor = rank.job.recovery.straggler_factor
        pp_of_rank = [mesh.coordinates(number).pp for number in range(mesh.world)]
        self._watch = StragglerWatch(pp_of_rank, work_of(rank.pipeline), self._factor)
        self._clock = ActionClock(rank.device)
        self._steps = done

    @property
    def clock(self) -> ActionClock | None:
        """The clock for the coming step; None if that step is not timed."""
        return self._clock if self._steps % _EVERY == 0 else None

    def before_step(self) -> tuple[int, ...]:
        """Returns this rank's share of the next agreement: microseconds by rank, () if untimed."""
        micros = [0] * len(self._labels) if self._steps and self._steps % _EVERY == 0 else []
        if micros:
            micros[self._seat.rank] = int(self._clock.taken_s() * 1e6)
        self._steps += 1
        return tuple(micros)

    def agreed(self, everyone: Sequence[int], tell: Callable[[Event], None]) -> None:
        """Takes all ranks' microseconds; empty if the last step was not timed."""
        # All zeros if another clock timed the step; those of other replicas if these train apart.
        if not any(everyone):
            return
        for rank, ratio in self._watch.seen([one / 1e6 for one in everyone]):
            words = (
                f"{self._labels[rank]} (rank {rank}) computes {ratio:.1f} times as long as its peers, in "
                f"{_IN_A_ROW} timed steps in a row (recovery.straggler_factor: {self._factor:g})"
            )
            details = {"rank": rank, "factor": round(ratio, 2)}
            tell(Event("straggler", words, attempt=self._seat.attempt, rank=rank, details=details))


def work_of(pipeline: ResolvedPipeline) -> list[float]:
    """Returns the work of each pipeline rank in layers; both ends count as in the cut. Where only
    upper stages train, those below have no backward: about half the work."""
    lowest = pipeline.trained.index(True)
    weights = [w / 2 if stage < lowest else w for stage, w in enumerate(pipeline.stage_weights)]
    return [sum(weights[stage] for stage in stages) for stages in pipeline.stages_of_rank]
