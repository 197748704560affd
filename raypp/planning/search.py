"""Finds the fastest mesh, cut, schedule and number of microbatches by forecasting every candidate.

The global batch stays that of the job: microbatches · micro_batch_size · replicas. Candidates that
cannot run, or that need more memory than a device has, are left out and counted.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from raypp.errors import RayppError, ResourcesError
from raypp.job.checks import check_training
from raypp.job.job import Job
from raypp.job.load import job_document
from raypp.job.models import with_experts
from raypp.job.precision import BF16, FP32, GROUPS_FP8
from raypp.planning.check import check_plan
from raypp.planning.costs import CostsOf, Device
from raypp.planning.decide import FAST_GBPS
from raypp.planning.decision import Kind
from raypp.planning.forecast import Forecast, forecast
from raypp.planning.geometry import divisors, shapes
from raypp.planning.levers import MOST_ACTIONS
from raypp.planning.machines import Machines
from raypp.planning.replica_sum_costs import hidden_exchanges
from raypp.planning.resolve import schedule_of
from raypp.planning.schedules.catalogue import SCHEDULES, schedule_named

_MOST_STAGES_PER_RANK = 4
_TP = (1, 2, 4, 8)
_WORTH = 0.995
"""A layer is moved only if the step's time falls below this fraction of the previous one."""


@dataclass(frozen=True)
class Candidate:
    """A job that could be run instead. `changes`: keys that differ from the given job, ready for
    `--set`. `job`: the job with these changes."""

    changes: Mapping[str, Any]
    job: Job
    forecast: Forecast

    def settings(self) -> list[str]:
        """Returns `key=value` settings for `raypp submit --set`."""
        return [
            f"{key}={value if isinstance(value, str) else json.dumps(value, separators=(',', ':'))}"
            for key, value in self.changes.items()
        ]


@dataclass(frozen=True)
class SearchResult:
    """Result of a search.

    Attributes:
        best: Candidates, fastest first.
        tried: Number of forecasts.
        refused: Candidates in which `check_plan` finds a problem.
        too_large: Candidates that need more memory than a device has.
        out_of_time: True if the search ended before all candidates were tried.
    """

    best: tuple[Candidate, ...]
    tried: int
    refused: int
    too_large: int
    out_of_time: bool


def search(
    job: Job,
    machines: Machines,
    costs: CostsOf,
    *,
    device_memory: int = 0,
    kind: Kind | None = None,
    keep: int = 10,
    patience_s: float = 60.0,
) -> SearchResult:
    """Ranks the jobs that do the same training on these machines.

    Args:
        job: Gives model, data and batch. Its mesh and pipeline may change, except for cp. Other tp
            are tried where nodes have several devices.
        machines: All their devices are used.
        costs: Costs of a device of speed 1, or the kind of device, for the costs of each job.
        device_memory: Bytes of a device; 0: no limit.
        kind: The kind of device whose memory is planned; None: the job's.
        patience_s: Time limit. The result then covers what has been tried.

    Raises:
        ResourcesError: No candidate can run.
    """
    end = time.monotonic() + patience_s
    candidates: list[Candidate] = []
    tried = refused = too_large = 0
    out_of_time = False
    for changes in _candidates(job, machines.devices, tensor_ranks(job, machines)):
        if time.monotonic() > end:
            out_of_time = True
            break
        one = changed_job(job, changes)
        if one is None or check_plan(one) or check_training(one):
            refused += 1
            continue
        try:
            prediction = forecast(one, machines, costs, device_memory, kind=kind)
        except RayppError:
            refused += 1
            continue
        tried += 1
        if device_memory and prediction.peak_memory > device_memory:
            too_large += 1
            continue
        candidates.append(Candidate(_difference(job, one, prediction), one, prediction))
    if not candidates:
        fault = f"none of {tried + refused} ways to split this job over {machines.devices} devices can run"
        why = f": {too_large} need more memory than a device has" if too_large else ""
        fix = "use more devices, activation_checkpointing full, or a smaller micro_batch_size"
        raise ResourcesError(fault + why, fix)
    candidates.sort(key=lambda one: (one.forecast.step_s, one.forecast.peak_memory, len(one.changes)))
    improved = [_better_cut(one, job, machines, costs, device_memory, kind, end) for one in candidates[:3]]
    best = sorted([*improved, *candidates[3:]], key=lambda one: one.forecast.step_s)
    return SearchResult(tuple(best[:keep]), tried, refused, too_large, out_of_time)


def advice(
    job: Job, machines: Machines, costs: CostsOf, now: Forecast, device_memory: int = 0, kind: Kind | None = None
) -> list[tuple[str, float]]:
    """Finds single changes that would shorten a step by more than 2 %, best first. Args as of
    `search`; `now`: the job's forecast with them. Returns each change, and the predicted fraction
    of the step's time that it saves."""
    pipeline = job.pipeline
    single: list[tuple[str, dict[str, Any]]] = []
    if job.mesh.pp > 1:
        if pipeline.lookahead != "auto":
            single.append(("pipeline.lookahead auto", {"pipeline.lookahead": "auto"}))
        if pipeline.wire.compression == "none":
            narrower = ["bf16"] if job.train.dtypes.compute is FP32 else []
            for form in (*narrower, "int8"):
                text = f"pipeline.wire.compression {form} (changes the numbers)"
                single.append((text, {"pipeline.wire.compression": form}))
        more, rows = 2 * pipeline.microbatches, job.train.micro_batch_size
        if rows % 2 == 0:
            text = f"smaller microbatches: pipeline.microbatches {more}, train.micro_batch_size {rows // 2}"
            single.append((text, {"pipeline.microbatches": more, "train.micro_batch_size": rows // 2}))
        else:
            single.append((f"pipeline.microbatches {more} (twice the batch)", {"pipeline.microbatches": more}))
    if job.train.dtypes.compute is BF16 and isinstance(costs, Device) and costs.computes("fp8"):
        single.append(("train.precision fp8 (changes the numbers)", {"train.precision": "fp8"}))
    grouped = job.train.dtypes.fp8 and isinstance(costs, Device) and costs.capability == GROUPS_FP8
    if grouped and with_experts(job.model) is not None and not job.train.fp8.experts:
        single.append(("train.fp8.experts true (changes the numbers)", {"train.fp8.experts": True}))
    if job.mesh.dp_replicate > 1 and job.train.sync.kind == "exact":
        single.append(("train.sync.kind int8 (changes the numbers)", {"train.sync.kind": "int8"}))
    if job.outer is not None and now.replica_sums is not None:
        hidden = hidden_exchanges(job, now.replica_sums, now.step_s - now.replica_sums.exposed_s)
        for sync in [one.train.sync for one in hidden if job.outer.every in one.outer_intervals()][:1]:
            text = f"train.sync.fragments {sync.fragments}, overlap_steps {sync.overlap_steps} (changes the numbers)"
            keys = {"train.sync.fragments": sync.fragments, "train.sync.overlap_steps": sync.overlap_steps}
            single.append((text, keys))
    gains = []
    tokens = now.tokens_per_s
    for text, changes in single:
        one = changed_job(job, changes)
        if one is None or check_plan(one) or check_training(one):
            continue
        prediction = forecast(one, machines, costs, device_memory, kind=kind)
        gain = 1 - tokens / prediction.tokens_per_s
        if gain > 0.02 and not (device_memory and prediction.peak_memory > device_memory):
            gains.append((text, gain))
    faster = Machines(machines.nodes, None, {}, machines.inside_gbps)
    if job.mesh.pp > 1 and now.links:
        gain = 1 - forecast(job, faster, costs, device_memory, kind=kind).step_s / now.step_s
        if gain > 0.02:
            gains.append(("links that cost nothing", gain))
    return sorted(gains, key=lambda entry: -entry[1])


def tensor_ranks(job: Job, machines: Machines) -> list[int]:
    """Returns the tp that a search tries, the job's own first."""
    model, own = job.model, job.mesh.tp
    divided = (model.num_heads, model.kv_heads, model.vocab_size, *(node.devices for node in machines.nodes))
    others = [tp for tp in _TP if tp != own and not any(size % tp for size in divided)]
    changed = {tp: changed_job(job, {"mesh.tp": tp}) for tp in others}
    return [own, *(tp for tp, one in changed.items() if one is not None and not check_plan(one))]


def tensor_remark(job: Job, machines: Machines, costs: CostsOf, device_memory: int, kind: Kind) -> str:
    """Returns what a job loses by its tp, if fsdp in its place fits and is faster; else "". Args as
    of `search`."""
    tp, fsdp, rows = job.mesh.tp, job.mesh.fsdp, job.pipeline.microbatches
    if tp == 1 or rows % tp:
        return ""
    other = changed_job(job, {"mesh.tp": 1, "mesh.fsdp": fsdp * tp, "pipeline.microbatches": rows // tp})
    if other is None or check_plan(other) or check_training(other):
        return ""
    now, then = (forecast(one, machines, costs, device_memory, kind=kind) for one in (job, other))
    if then.step_s > 0.98 * now.step_s or (device_memory and then.peak_memory > device_memory):
        return ""
    rate = machines.inside_gbps
    slow = f", which have {rate:,.0f} Gbit/s between them" if rate < FAST_GBPS else ""
    return (
        f"mesh.tp {tp}: with mesh.fsdp {fsdp * tp} instead, a step takes {1 - then.step_s / now.step_s:.0%} less; tp "
        f"inside a node pays for large models and few rows, since ranks wait for each other{slow}"
    )


def _candidates(job: Job, devices: int, tp: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yields changes of keys: the job's own tp first, few pipeline ranks before many, 1F1B before
    other schedules."""
    meshes = shapes(devices, rows=job.rows_per_step, keep=job.mesh.sizes, ep=job.mesh.ep, tp=tp)
    for one in sorted(meshes, key=lambda one: (tp.index(one.tp), one.pp, -one.fsdp)):
        mesh = {f"mesh.{axis}": getattr(one, axis) for axis in ("pp", "fsdp", "dp_replicate", "tp")}
        own = job.rows_per_step // one.replicas
        for rows in divisors(own):
            if rows > 4 * job.train.micro_batch_size:
                break
            microbatches = own // rows
            sizes = {"pipeline.microbatches": microbatches, "train.micro_batch_size": rows}
            for schedule, stages in _schedules(job, one.pp, microbatches):
                if one.pp * stages <= job.model.num_layers and 2 * one.pp * stages * microbatches <= MOST_ACTIONS:
                    kinds = {"pipeline.schedule": schedule, "pipeline.stages_per_rank": stages}
                    yield {**mesh, **sizes, **kinds, "pipeline.layers_per_stage": None}


def _schedules(job: Job, pp: int, microbatches: int) -> Iterator[tuple[str, int]]:
    if pp == 1:
        yield "1f1b", 1
        return
    own = schedule_named(schedule_of(job))
    for schedule in [*SCHEDULES.usable(), *([own] if own.name not in SCHEDULES else [])]:
        if not schedule.searched_from or microbatches < schedule.least_microbatches(pp):
            continue
        least, most = schedule.stages_per_rank
        for stages in range(max(least, schedule.searched_from), min(most, _MOST_STAGES_PER_RANK) + 1):
            yield schedule.name, stages


def _better_cut(
    one: Candidate, job: Job, machines: Machines, costs: CostsOf, device_memory: int, kind: Kind | None, end: float
) -> Candidate:
    """Moves layers away from a candidate's busiest pipeline rank while the forecast improves. Ends
    at the time `end` (monotonic). The default cut knows no measured costs or speeds."""
    if one.job.num_stages == 1:
        return one
    placement = one.forecast.pipeline.stages_of_rank
    best = one
    for _ in range(one.job.model.num_layers):
        cut, better = best.forecast.pipeline.cut, None
        busiest = max(range(len(placement)), key=best.forecast.stage_s.__getitem__)
        for source in placement[busiest]:
            for target in range(len(cut)):
                if target in placement[busiest] or cut[source] < 2:
                    continue
                if time.monotonic() > end:
                    return better or best
                moved = list(cut)
                moved[source] -= 1
                moved[target] += 1
                changed = changed_job(best.job, {"pipeline.layers_per_stage": moved})
                if changed is None:
                    continue
                prediction = forecast(changed, machines, costs, device_memory, kind=kind)
                fits = not device_memory or prediction.peak_memory <= device_memory
                if fits and prediction.step_s < (better or best).forecast.step_s * _WORTH:
                    better = Candidate(_difference(job, changed, prediction), changed, prediction)
        if better is None:
            break
        best = better
    return best


def changed_job(job: Job, changes: Mapping[str, Any]) -> Job | None:
    """Returns the job with changed keys; None if the result is not a valid job."""
    document = job_document(job)
    for key, value in changes.items():
        *sections, name = key.split(".")
        place = document
        for section in sections:
            if place[section] is None:  # an optional section
                place[section] = {}
            place = place[section]
        place[name] = value
    try:  # a job's own document: of what `parse_job` does, only the models' checks are missing
        changed = Job.model_validate_json(json.dumps(document), strict=True)
    except ValidationError:
        return None
    ours, theirs = changed.model, job.model
    if ours == theirs and ours.model_fields_set == theirs.model_fields_set:
        # The same object: caches by model then find it without comparing all its fields.
        return changed.model_copy(update={"model": theirs})
    return changed


def _difference(job: Job, other: Job, prediction: Forecast) -> dict[str, Any]:
    ours, theirs = job_document(job), job_document(other)
    changes: dict[str, Any] = {}
    for section in ("mesh", "pipeline", "train"):
        for name, value in theirs[section].items():
            if value != ours[section][name]:
                changes[f"{section}.{name}"] = value
    if job.pipeline.lookahead == "auto" and prediction.lookahead:
        changes["pipeline.lookahead"] = prediction.lookahead
    return changes
