"""Compares a job on its mesh with the same job in one process, tensor by tensor, for a few steps.
Both run on local gloo ranks on the CPU. It needs no cluster and no store: every rank writes its
results as safetensors to a temporary directory."""

import json
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from raypp.control.calls import Tell
from raypp.job.job import Job
from raypp.job.load import job_document, parse_job
from raypp.planning.decide import ON_CPUS, decide, settle
from raypp.rank.assemble import assemble
from raypp.rank.data.loader import Loader
from raypp.rank.device_check import facts_here
from raypp.rank.own_seat import local_seat
from raypp.rank.step.step import StepRunner, Stopwatch
from raypp.records import ONE_RANK, Event, Requests, Seat, StepReport
from raypp.stages.parallel.shard import on_own_device
from raypp.tools.local_ranks import run_ranks

Tensors = dict[str, Tensor]


def whole(tensor: Tensor) -> Tensor:
    """Copies a whole tensor `[...]` to the CPU. Collective over its mesh if it is sharded."""
    tensor = on_own_device(tensor)
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu().clone()


def train_some_steps(
    job: Job,
    seat: Seat,
    steps: int,
    keep: Callable[[str, Tensors], None],
    *,
    wrap: Callable[[Loader, int], Any] = lambda loader, replica: loader,
    before: Callable[[int, StepRunner], None] = lambda step, runner: None,
    tell: Callable[[Event], None] = lambda event: None,
) -> list[StepReport]:
    """Trains the first steps of a job on one rank, without a store or a controller.

    Collective over the mesh. `keep`: called with `step-1`, `step-2` … and the scaled gradients of
    this rank's stages, then with `weights` and their weights: whole tensors, `[*parameter.shape]`,
    by global name. A step without any label has no gradients. `wrap`: returns the loader to read
    from, given the replica's own loader and its number. `before`: called before each step."""
    with assemble(decide(job, facts_here(seat)), seat, hang_timeout_s=60) as rank:
        runner = StepRunner(replace(rank, loader=wrap(rank.loader, seat.replica)), tell=tell)
        reports: list[StepReport] = []
        named = [(name, p) for module in rank.built.modules for name, p in module.named_parameters()]

        def keep_gradients(*_: Any) -> None:
            keep(f"step-{len(reports) + 1}", {name: whole(p.grad) for name, p in named if p.grad is not None})

        rank.optimizer.register_step_pre_hook(keep_gradients)
        for step in range(1, steps + 1):
            before(step, runner)
            watch = Stopwatch()
            reports.append(runner.run(step, runner.read(Requests(), watch), watch))
        modules = rank.built.modules
        kept = {name for module in modules for name in module.state_dict(keep_vars=True)}
        buffers = (pair for module in modules for pair in module.named_buffers())
        state = {name: buffer.clone() for name, buffer in buffers if name in kept}
        keep("weights", {name: whole(p) for module in modules for name, p in module.named_parameters()} | state)
    return reports


def one_process_job(job: Job) -> Job:
    """Returns the same job for one rank: one stage, all replicas' microbatches in sequence."""
    pipeline = {
        "schedule": "1f1b",
        "stages_per_rank": 1,
        "lookahead": 0,
        "layers_per_stage": None,
        "microbatches": job.pipeline.microbatches * job.mesh.replicas,
        "wire": {"dtype": "auto", "compression": "none"},
    }
    document = job_document(job)
    document["mesh"] |= {**ONE_RANK.as_dict(), "ep": 1}
    document["pipeline"] |= pipeline
    return parse_job(document)


# One rank's process.


def _rank(rank: int, port: int, _tell: Tell, document: dict[str, Any], steps: int, folder: str) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    place = Path(folder)
    job = parse_job(document)
    seat = local_seat(rank, job.mesh.world, port, job)
    # Other replicas have the same tensors; only the first writes them.
    writes = not any(seat.coordinates.column)

    def keep(name: str, tensors: Tensors) -> None:
        """Writes whole tensors `[...]` to a file of this rank."""
        if writes:
            save_file(tensors, place / f"{name}.{rank}.safetensors")

    reports = train_some_steps(job, seat, steps, keep)
    figures = [{"loss": r.loss, "grad_norm": r.grad_norm, "tokens": r.tokens} for r in reports]
    (place / f"figures.{rank}.json").write_text(json.dumps(figures))


# The comparison.


def relative_error(value: Tensor, reference: Tensor) -> float:
    """Returns |value - reference| / |reference| by 2-norms, for two tensors `[...]` of one shape.
    Infinity if the reference is zero and the other is not, or if a norm is not finite."""
    difference = float((value.double() - reference.double()).norm())
    size = float(reference.double().norm())
    if difference == 0:
        return 0.0
    return difference / size if size and math.isfinite(difference) and math.isfinite(size) else math.inf


def compare(mesh_folder: Path, reference: Path, steps: int) -> dict[str, Any]:
    """Compares the results that two runs wrote to their folders. Returns `steps`: per step the loss
    and gradient norm of both, and how many gradients differ; `parameters`: those whose gradient or
    final weight differs, worst first; `max_error`; `bitwise`."""
    ours, theirs = (json.loads((folder / "figures.0.json").read_text()) for folder in (mesh_folder, reference))
    rows: list[dict[str, Any]] = []
    gradients: dict[str, float] = {}
    bitwise = ours == theirs
    for index in range(steps):
        errors = _errors(mesh_folder, reference, f"step-{index + 1}")
        for name, (error, _) in errors.items():
            gradients[name] = max(gradients.get(name, 0.0), error)
        differing = sum(not same for _, same in errors.values())
        bitwise &= not differing
        rows.append(
            {
                "step": index + 1,
                "loss": [ours[index]["loss"], theirs[index]["loss"]],
                "grad_norm": [ours[index]["grad_norm"], theirs[index]["grad_norm"]],
                "tokens": [ours[index]["tokens"], theirs[index]["tokens"]],
                "gradients": len(errors),
                "differing": differing,
                "worst": max((error for error, _ in errors.values()), default=0.0),
            }
        )
    weights = _errors(mesh_folder, reference, "weights")
    bitwise &= all(same for _, same in weights.values())
    parameters = [
        {"name": name, "gradient_error": gradients.get(name, 0.0), "weight_error": weights[name][0]} for name in weights
    ]
    differing_names = [p for p in parameters if p["gradient_error"] or p["weight_error"]]
    pairs = [torch.tensor(row[key], dtype=torch.float64) for row in rows for key in ("loss", "grad_norm", "tokens")]
    scalars = [relative_error(*pair) for pair in pairs]
    return {
        "steps": rows,
        "parameters": sorted(differing_names, key=lambda p: -max(p["gradient_error"], p["weight_error"])),
        "compared": len(weights),
        "max_error": max([*scalars, *gradients.values(), *(error for error, _ in weights.values())], default=0.0),
        "bitwise": bitwise,
    }


def _errors(ours: Path, reference: Path, kind: str) -> dict[str, tuple[float, bool]]:
    """Returns each name's error and equality; infinity for a name that only one run has."""
    theirs: Tensors = {}
    for file in sorted(reference.glob(f"{kind}.*.safetensors")):
        theirs.update(load_file(file))
    seen: dict[str, tuple[float, bool]] = {}
    for file in sorted(ours.glob(f"{kind}.*.safetensors")):
        for name, value in load_file(file).items():
            other = theirs.get(name)
            now = (math.inf, False)
            if other is not None and other.shape == value.shape:
                now = relative_error(value, other), torch.equal(value, other)
            # Both ends of a tied embedding have it: the larger error counts.
            seen[name] = max(now, seen.get(name, now))
    return seen | {name: (math.inf, False) for name in theirs if name not in seen}


def run_parity(job: Job, steps: int, tolerance: float | None = None) -> dict[str, Any]:
    """Runs a job on its mesh and in one process, and compares the results. `tolerance`: the largest
    relative error; None: that of the dtype it computes in. Returns the result of `compare`, and
    `world`, `tolerance`, `seconds`, `passed`. Raises RayppError: a rank failed."""
    started = time.monotonic()
    job = settle(job, ON_CPUS)
    limit = job.train.dtypes.compute.tolerance if tolerance is None else tolerance
    with TemporaryDirectory(prefix="raypp-parity-") as folder:
        ours, reference = Path(folder, "mesh"), Path(folder, "one")
        for place, one in ((ours, job), (reference, one_process_job(job))):
            place.mkdir()
            run_ranks(one.mesh.world, _rank, job_document(one), steps, str(place))
        result = compare(ours, reference, steps)
    passed = result["bitwise"] or result["max_error"] <= limit
    seconds = round(time.monotonic() - started, 1)
    return {"world": job.mesh.world, "tolerance": limit, "seconds": seconds, "passed": passed, **result}


def answer(request: Mapping[str, Any], _tell: Tell) -> dict[str, Any]:
    """Answers `{"job", "steps", "tolerance"}`: see `run_parity`."""
    return run_parity(parse_job(request["job"]), int(request["steps"]), request.get("tolerance"))
