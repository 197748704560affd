"""Searches the changes that make a job fit into the memory of its devices.

Every mesh of the given devices is tried with the levers of `planning.levers`, one by one and
together. Only what is needed is proposed: no combination contains another one that fits on the same
mesh. All are planned, so the answer is as good as the plan: an estimate.

As a program, it answers a rank (`train.device_memory`): the keyword arguments of `changes_in_words`
come as JSON on its standard input, the sentence goes to its standard output.
"""

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from raypp.errors import JobError, Problem, ResourcesError, size_text
from raypp.job.checks import check_training
from raypp.job.job import Job
from raypp.job.load import parse_job
from raypp.planning.check import check_plan
from raypp.planning.costs import DEVICES, Device, computed_costs
from raypp.planning.decide import EACH, LAST, decide_reduction
from raypp.planning.decision import too_little
from raypp.planning.forecast import forecast
from raypp.planning.host_memory import offload_problems
from raypp.planning.levers import LEVERS, Changes, Lever, in_host_memory, meshes
from raypp.planning.machines import Machines
from raypp.planning.memory import memory_kind, peak_memory, rank_memories
from raypp.planning.search import Candidate, changed_job
from raypp.untrusted.text import shell_word

PATIENCE_S = 20.0
"""Seconds that a search takes at most, unless told otherwise."""
_MOST_TIMES = 16
"""More than this many times the job's devices are not proposed."""
_CLOSE = 1.25
"""Times a device's memory. Beyond it, leaving out one lever will not help."""
_KEEPING = [lever for lever in LEVERS if not lever.apart]

Point = tuple[int, ...]
"""The level of every lever; 0: unchanged."""


@dataclass(frozen=True)
class Proposal(Candidate):
    """A change with which a job fits. `costs`: what it costs besides time, for people."""

    costs: tuple[str, ...] = ()

    @property
    def peak(self) -> int:
        """Bytes of the rank that then needs most."""
        return self.forecast.peak_memory


@dataclass(frozen=True)
class Fitting:
    """Result of a search for changes that make a job fit.

    Attributes:
        now: The job as it is; None if its plan needs more memory than a device has.
        need: Bytes of the rank that needs most now.
        capacity: Bytes of a device.
        same: Changes that keep model, data and batch. Fastest first.
        apart: The fastest change of each kind that trains something else.
        nearest: The change that needs least memory, if none keeps the training and fits.
        more: The fastest change on the smallest number of devices that suffices, if none fits on
            the given ones.
        tried: Number of combinations whose memory was planned.
        out_of_time: True if the search ended before all were tried.
    """

    now: Proposal | None
    need: int
    capacity: int
    same: tuple[Proposal, ...] = ()
    apart: tuple[Proposal, ...] = ()
    nearest: Proposal | None = None
    more: Proposal | None = None
    tried: int = 0
    out_of_time: bool = False


def changes_that_fit(
    job: Job,
    machines: Machines,
    device: Device,
    *,
    keep: int = 5,
    patience_s: float = PATIENCE_S,
    host: Mapping[str, int] | None = None,
) -> Fitting:
    """Finds changes with which every rank fits into its device; the tokens of a step stay.

    Args:
        job: A job in which `check_plan` finds no problem.
        machines: The nodes. As many of their devices are used as the job has ranks.
        patience_s: Time limit. The result then covers what has been tried.
        host: Free bytes of host memory by node, 0 if unknown. None: those of the machines.

    Raises:
        ResourcesError: The job has more ranks than the machines have devices.
    """
    search = _Search(machines, device, time.monotonic() + patience_s, host or machines.free_memory)
    decided, _ = decide_reduction(job, machines, device.memory, search.kind)
    need, now = peak_memory(decided, search.kind), search.proposal(job, {})
    if now is not None:
        return Fitting(now, now.peak, device.memory, tried=1)
    same = search.on_devices(job, job.mesh.world)
    nearest = None if same else search.nearest(job)
    apart = tuple(one for lever in LEVERS if lever.apart for one in search.weakest(job, lever))
    more = None if same else search.on_more_devices(job)
    return Fitting(
        None, need, device.memory, tuple(same[:keep]), apart, nearest, more, search.tried, search.out_of_time
    )


class _Search:
    """Plans combinations of changes until a time of the monotonic clock, `end`. `tried`: number of
    combinations whose memory was planned. `out_of_time`: True once the time was reached."""

    def __init__(self, machines: Machines, device: Device, end: float, host: Mapping[str, int]) -> None:
        self.kind = device.kind
        self.tried = 0
        self.out_of_time = False
        self._machines, self._device, self._end, self._host = machines, device, end, host
        self._too_large: list[tuple[int, Changes, tuple[str, ...]]] = []

    def on_devices(self, job: Job, devices: int) -> list[Proposal]:
        """Returns what fits on this many devices, fastest first."""
        proposals: list[Proposal] = []
        for shape in meshes(job, devices, self._late):
            if self._late():
                break
            shaped = changed_job(job, shape)
            if shaped is not None:
                proposals += self._on_shape(shaped, shape)
        return sorted(proposals, key=lambda one: (one.forecast.step_s, one.peak, len(one.changes)))

    def _on_shape(self, shaped: Job, shape: Changes) -> list[Proposal]:
        """Returns the smallest sets of levers with which a mesh fits. If the strongest levels
        together need too much, and not without one of them, the mesh is given up."""
        levels = [[{}, *self._levels(lever, shaped)] for lever in _KEEPING]
        strongest = tuple(len(one) - 1 for one in levels)
        peaks: dict[tuple[tuple[str, Any], ...], int | None] = {}

        def peak(point: Point) -> int | None:
            changes = _changes(levels, point)
            key = tuple(sorted(changes.items()))
            if key not in peaks:
                most = peaks[key] = self._peak(changed_job(shaped, changes))
                if most is not None:
                    self._too_large.append((most, {**shape, **changes}, self._costs(point)))
            return peaks[key]

        def fits(point: Point) -> bool:
            needed = peak(point)
            return needed is not None and needed <= self._device.memory

        if not fits(strongest):
            least = peak(strongest)
            close = least is None or least <= _CLOSE * self._device.memory
            if not close or not any(map(fits, _each_left_out(strongest))):
                return []
        proposals: list[Proposal] = []
        smallest: list[Point] = []
        every = product(*(range(level + 1) for level in strongest))
        for point in sorted(every, key=lambda point: (sum(map(bool, point)), sum(point))):  # of few levers first
            if self._late():
                break
            contains_one = any(all(a <= b for a, b in zip(one, point, strict=True)) for one in smallest)
            if contains_one or not fits(point):
                continue
            changes = _changes(levels, point)
            one = changed_job(shaped, changes)
            proposal = self.proposal(one, {**shape, **changes}, self._costs(point)) if one else None
            if proposal is not None:
                smallest.append(point)
                proposals.append(proposal)
        return proposals

    def _levels(self, lever: Lever, job: Job) -> list[Changes]:
        taken = [one for one in lever.levels(job) if self.kind != "cpu" or not in_host_memory(one)]
        needs = [one.get("train.precision", "fp32" if one.get("model.lora.base") != "fp8" else "fp8") for one in taken]
        taken = [one for one, precision in zip(taken, needs, strict=True) if self._device.computes(precision)]
        return [one for one in taken if (changed := changed_job(job, one)) and not check_training(changed)]

    def weakest(self, job: Job, lever: Lever) -> Iterator[Proposal]:
        """Yields the fastest proposal with the weakest level of a lever that suffices."""
        for changes in lever.levels(job):
            one = changed_job(job, changes)
            devices = self.on_devices(one, job.mesh.world) if one is not None else []
            if devices:
                best = devices[0]
                yield replace(best, changes={**changes, **best.changes}, costs=(lever.costs, *best.costs))
                return

    def nearest(self, job: Job) -> Proposal | None:
        """Returns the combination tried so far that needs least memory and can run."""
        for _, changes, costs in sorted(self._too_large, key=lambda entry: (entry[0], len(entry[1]))):
            one = changed_job(job, changes)
            proposal = self.proposal(one, changes, costs, any_size=True) if one is not None else None
            if proposal is not None or self._late():
                return proposal
        return None

    def on_more_devices(self, job: Job) -> Proposal | None:
        """Returns the fastest combination on the smallest number of devices that suffices."""
        given, factor = self._machines, 2
        while factor <= _MOST_TIMES and not self._late():
            self._machines = given.times(factor)
            self._host = self._machines.free_memory
            devices = self.on_devices(job, factor * job.mesh.world)
            if devices:
                return devices[0]
            factor *= 2
        return None

    def proposal(
        self, one: Job, changes: Changes, costs: tuple[str, ...] = (), *, any_size: bool = False
    ) -> Proposal | None:
        """Returns a job with its forecast; None if it cannot run, or needs more than a device."""
        try:
            if check_training(one) or check_plan(one) or offload_problems(one, self._host, self.kind):
                return None
            costed = computed_costs(one, self._device)
            prediction = forecast(one, self._machines, costed, self._device.memory, kind=self.kind)
        except (JobError, ResourcesError):
            return None
        if any_size or prediction.peak_memory <= self._device.memory:
            if changes and self._for_memory(one):  # said: with a larger device, auto would decide otherwise
                changes = {**changes, "mesh.reduce_gradients": EACH}
                one = one.with_reduction(EACH)
            return Proposal(dict(changes), one, prediction, costs)
        return None

    def _for_memory(self, one: Job) -> bool:
        """Whether a job sums in every backward only because it would not fit otherwise."""
        ways = (decide_reduction(one, self._machines, size, self.kind)[0] for size in (self._device.memory, 0))
        return [way.mesh.reduce_gradients for way in ways] == [EACH, LAST]

    def _peak(self, one: Job | None) -> int | None:
        """Returns the planned memory of a job; None if there is no plan, or no time for one."""
        if one is None or self._late():
            return None
        self.tried += 1
        try:
            one, _ = decide_reduction(one, self._machines, self._device.memory, self.kind)
            return peak_memory(one, self.kind)
        except JobError:
            return None

    def _costs(self, point: Point) -> tuple[str, ...]:
        used = (lever.costs for lever, level in zip(_KEEPING, point, strict=True) if level)
        return tuple(costs for costs in used if costs)

    def _late(self) -> bool:
        self.out_of_time = self.out_of_time or time.monotonic() > self._end
        return self.out_of_time


def _changes(levels: Sequence[Sequence[Changes]], point: Point) -> dict[str, Any]:
    together: dict[str, Any] = {}
    for of_lever, level in zip(levels, point, strict=True):
        together |= of_lever[level]
    return together


def _each_left_out(point: Point) -> list[Point]:
    """Returns the combinations in which one lever is left out, or one level weaker."""
    weaker = [(at, less) for at, level in enumerate(point) if level for less in {0, level - 1}]
    return [(*point[:at], less, *point[at + 1 :]) for at, less in weaker]


_IN_WORDS = 3


def set_words(one: Candidate) -> str:
    """Returns a candidate's changes as they are typed: `--set a=1 --set b=2`."""
    return " ".join(f"--set {shell_word(setting)}" for setting in one.settings())


def memory_problems(job: Job, capacity: int, host: Mapping[str, int] | None = None) -> list[Problem]:
    """Returns a problem if ranks need more memory than a device has, with changes that make it fit.
    `job`: a job in which `check_plan` finds no problem. `host`: as for `changes_in_words`."""
    lack = too_little([memory.total for memory in rank_memories(job)], capacity)
    return [Problem("train", lack, changes_in_words(job, capacity, host=host))] if lack else []


def changes_in_words(
    job: Job, capacity: int, factor: float = 1.0, patience_s: float = PATIENCE_S, host: Mapping[str, int] | None = None
) -> str:
    """Returns the first changes of `changes_that_fit` as one sentence.

    They are ranked by their times on an unnamed device with free links.

    Args:
        job: A job in which `check_plan` finds no problem.
        factor: What a rank was measured to need, relative to its plan.
        host: Free bytes of host memory by node, where they are known: no change offloads more.
    """
    device = replace(DEVICES[memory_kind(job)], memory=int(capacity / factor))
    machines = Machines.alike(job.mesh.world, max(1, job.mesh.world // job.mesh.pp), None)
    fits = changes_that_fit(job, machines, device, keep=_IN_WORDS, patience_s=patience_s, host=host)
    words = [_in_words(one, factor) for one in fits.same]
    if fits.more is not None:
        words.append(f"{_in_words(fits.more, factor)} on {fits.more.job.mesh.world} devices")
    words += [_in_words(one, factor) for one in fits.apart]
    if words:
        return f"fits by plan: {'; or '.join(words)}"
    nearest = f" (the nearest: {_in_words(fits.nearest, factor)})" if fits.nearest else ""
    none = f"no change that was tried fits into {size_text(capacity)} by plan{nearest}"
    return f"{none}: use more devices, or a smaller model or sequence"


def _in_words(one: Proposal, factor: float) -> str:
    costs = f", {', '.join(one.costs)}" if one.costs else ""
    return f"{set_words(one)} ({size_text(factor * one.peak)}{costs})"


if __name__ == "__main__":
    question = json.load(sys.stdin)
    sys.stdout.write(changes_in_words(parse_job(question.pop("job")), **question))
