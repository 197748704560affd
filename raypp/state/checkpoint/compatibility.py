"""Checks whether a run can resume with a changed job.

Mesh, schedule and steps may change; what gives weights and data position their meaning may not.
"""

from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import Any

from raypp.errors import JobError, Problem
from raypp.job.job import Job
from raypp.job.load import parse_job
from raypp.job.precision import PRECISIONS
from raypp.untrusted.text import visible

_ABSENT = object()
_PROBLEMS_SHOWN = 20
_LONGEST_VALUE = 200
_JUMP = 1.25
"""A resume changes the learning rate by more than this factor only with a warning."""


def check_resume(old_job: Mapping[str, Any], new_job: Job | Mapping[str, Any]) -> list[Problem]:
    """Finds every changed field that makes the run's checkpoints unusable.

    These may change: mesh, pipeline, train.steps and the learning rate, checkpoint, recovery,
    resources, data.eval.path, model.max_context, and `model.from_hf` and `model.from_run`, which
    only a run without checkpoints reads, or which holds the same frozen weights
    (`model.lora.base_id`). So may the paths of tokenizer and chat template: their contents are part
    of the data position. Fields that the old document lacks are not compared.

    These may not change: the rest of model and data, train.seed (it orders the data),
    train.optimizer.kind and state, and the number of rows that all replicas together take per step.
    `old_job`: the resolved job of the run (`runs.read_spec`), or the `job` of a commit. `new_job`:
    the job to resume with, or its resolved document. Returns one problem per field, with the old
    and the new value; empty if the run can resume.
    """
    new = new_job.model_dump(mode="json") if isinstance(new_job, Job) else dict(new_job)
    problems: list[Problem] = []
    for section in ("model", "data"):
        before, after = _meaning(old_job, section), _meaning(new, section)
        if "bytes" not in (before.get("tokenizer", "bytes"), after.get("tokenizer", "bytes")):
            del before["tokenizer"]  # two files
        problems.extend(_changed(*difference) for difference in _differences(before, after, section))
    for path in (("train", "seed"), ("train", "optimizer", "kind"), ("train", "optimizer", "state")):
        before, after = _at(old_job, path), _at(new, path)
        if before is not _ABSENT and before != after:
            problems.append(_changed(".".join(path), before, after))
    problems.extend(_rows_per_step(old_job, new))
    left = len(problems) - _PROBLEMS_SHOWN
    return [*problems[:_PROBLEMS_SHOWN], *([Problem("", f"and {left} more keys")] if left > 0 else [])]


def check_steps(newest: int, steps: int) -> list[Problem]:
    """Returns a problem if a run's newest checkpoint is of a later step than its job has."""
    if newest <= steps:
        return []
    fix = f"use more than {newest} to train longer; `raypp eval` and `raypp generate` take a step with --step"
    return [Problem("train.steps", f"is {steps}, but the run is at step {newest}, which has a checkpoint", fix)]


def as_recorded(job: Job, old_job: Mapping[str, Any], say: Callable[[str], None] = lambda _words: None) -> Job:
    """Returns a job with what its `auto` meant before, on whatever device, for the run that it
    resumes. Another precision would change what its weights are rounded to, and the base of its
    adapters. `say`: gets what the user should know."""
    precision, when = str(_at(old_job, ("train", "precision"))), _at(old_job, ("mesh", "reduce_gradients"))
    steps, kind = (_at(old_job, ("train", "sync", name)) for name in ("every_steps", "kind"))
    if job.train.precision == "auto" and precision in PRECISIONS:
        say(f"train.precision: auto is {precision}, as before")
        job = job.with_precision(precision)
    if when in ("each_microbatch", "last_microbatch"):
        job = job.with_reduction(when)
    if job.train.sync.every_steps == "auto" and isinstance(steps, int) and kind == "outer":
        say(f"train.sync.every_steps: auto is {steps}, as before")
        job = job.with_every_steps(steps)
    return job


def rate_jump(old_job: Mapping[str, Any], new: Job, step: int) -> str | None:
    """Returns a warning if the learning rate jumps where a run resumes, because its end has moved.
    Silent where the job itself sets another rate or schedule. `old_job`: a commit's `job`."""
    try:
        old = parse_job({"name": "run", "train": old_job.get("train") or {}}).train
    except JobError:  # a kind of optimizer that is not here
        return None
    train = new.train
    if not 1 <= step < train.steps or (old.optimizer.lr, old.lr_schedule) != (train.optimizer.lr, train.lr_schedule):
        return None
    before, expected, after = old.learning_rate(step), old.learning_rate(step + 1), train.learning_rate(step + 1)
    if expected / _JUMP <= after <= expected * _JUMP:
        return None
    keep = f"train.optimizer.lr={before:.3g}, train.lr_schedule.kind=constant and train.lr_schedule.warmup_steps=0"
    return (
        f"the learning rate jumps from {before:.3g} at step {step} to {after:.3g} at step {step + 1}: "
        f"train.steps is {train.steps}, was {old.steps}, and {train.lr_schedule.kind} falls to the last step. "
        + (f"To keep {before:.3g}, set {keep}" if before else "To choose it, set train.optimizer.lr")
    )


def _meaning(job: Mapping[str, Any], section: str) -> dict[str, Any]:
    """Returns the section without fields that may change. The path of the held-out data matters
    only if they are cut from the training data."""
    meaning = dict(job.get(section) or {})
    for name in ("from_hf", "from_run", "original", "max_context") if section == "model" else ("chat_template",):
        meaning.pop(name, None)
    if "eval" in meaning:
        held_out = meaning["eval"]
        fraction = held_out.get("fraction") if isinstance(held_out, Mapping) else held_out
        meaning["eval"] = {"fraction": fraction} if fraction else None
    return meaning


def _rows_per_step(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Problem]:
    """Checks that a step takes as many rows as before, else positions and steps change meaning."""
    was, now = _rows(old), _rows(new)
    if was is None or now is None or was[0] == now[0]:
        return []
    names = "mesh.dp_replicate × mesh.fsdp × pipeline.microbatches × train.micro_batch_size"
    fault = f"a step would take {now[0]} rows ({names} = {now[1]}), but the run's steps took {was[0]} ({was[1]})"
    return [Problem("pipeline.microbatches", fault, "change these keys so that their product stays the same")]


def _rows(job: Mapping[str, Any]) -> tuple[int, str] | None:
    paths = (("mesh", "dp_replicate"), ("mesh", "fsdp"), ("pipeline", "microbatches"), ("train", "micro_batch_size"))
    factors = [_at(job, path) for path in paths]
    if _ABSENT in factors:
        return None
    # Damaged factors have no product; they differ from any others.
    product = prod(factors) if all(isinstance(factor, int) for factor in factors) else -1
    return product, " × ".join(_short(str(factor)) for factor in factors)


def _at(document: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    value: Any = document
    for name in path:
        if not isinstance(value, Mapping) or name not in value:
            return _ABSENT
        value = value[name]
    return value


def _differences(old: Any, new: Any, key: str) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for name, before in old.items():
            yield from _differences(before, new.get(name, _ABSENT), f"{key}.{name}")
    elif _plain(old) != _plain(new):
        yield key, old, new


def _plain(value: Any) -> Any:
    """Returns the value with tuples as lists, because JSON has no tuples."""
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _short(text: str) -> str:
    return visible(text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}…")


def _changed(key: str, before: Any, after: Any) -> Problem:
    if key == "model.lora.base_id":
        after, before = _short(str(after)), _short(str(before))
        fault = f"names other weights ({after}) than those the run's adapters belong to ({before})"
        return Problem("model.from_hf", fault, "name the model that the run began with, or start a new run")

    def shown(value: Any) -> str:
        return "not set" if value is _ABSENT or value is None else _short(repr(value))

    fault = f"is {shown(after)}, but the run began with {shown(before)}: its checkpoints do not fit the new value"
    return Problem(key, fault, f"set it back to {shown(before)}, or start a new run under another name")
