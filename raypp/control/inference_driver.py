"""`python -m raypp.control.inference_driver`: the entrypoint of a Ray job that uses a model.

`raypp-inference.json` in the working directory is the request. One actor for each rank of its mesh
computes; each reads its part of the weights itself. Standard output has what rank 0 reports, one
JSON object per line. The last one is the answer, or `error`. Actors and placement group belong to
this job: Ray ends them with it.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raypp.control.credentials import forget, load_private_environment
from raypp.control.inference_worker import InferenceWorker
from raypp.control.package import INFERENCE_FILE
from raypp.control.placement import Placement
from raypp.control.protocol import NAMESPACE, rank_environment
from raypp.control.ray_nodes import all_nodes
from raypp.control.seats import Rank, planned_ranks, seats_for
from raypp.control.worker_group import ACTOR_ENVIRONMENT
from raypp.environment import check_node
from raypp.errors import EXIT_OK, RayppError, ResourcesError
from raypp.inference.processes import died, error_document, first_error
from raypp.mesh.geometry import Mesh
from raypp.spec.job import Job
from raypp.spec.load import parse_job

_START_TIMEOUT_S = 180.0
_REPORTS_S = 10.0
_PAUSE_S = 0.05
_CAUSE_S = 90.0
"""Seconds to wait for the cause when ranks only report lost peers. Ray reports a lost node late."""
_THREADS = 4


def main() -> int:
    """Carries out the request; returns the exit code."""
    try:
        check_node(f"the head {socket.gethostname()}")
        ray.init(namespace=NAMESPACE, log_to_driver=False, logging_level=logging.WARNING)
        load_private_environment()
        answer = carry_out(json.loads(Path(INFERENCE_FILE).read_text()))
    except RayppError as error:
        _print({"error": error_document(error, peer=False)})
        return error.exit_code
    finally:
        forget()
    _print(answer)
    return EXIT_OK


def carry_out(request: Mapping[str, Any]) -> dict[str, Any]:
    """Starts the ranks, prints what rank 0 reports, and returns its answer.

    Raises:
        ResourcesError: The devices did not become free.
        GenerationError: A rank failed.
    """
    job = parse_job(request["job"])
    ranks = _started(request["name"], job, request["device"])
    seats = seats_for(request["name"], 1, Mesh.of(job.mesh), ranks, request["device"])
    if "tasks" in request:
        _prepare(request, ranks[0])
    running = {rank.actor.run.remote(request, seat): rank for rank, seat in zip(ranks, seats, strict=True)}
    reports = ranks[0].actor.reports.remote(_REPORTS_S)
    answers: dict[int, dict[str, Any]] = {}
    errors: dict[int, dict[str, Any]] = {}

    def take(reference: Any) -> None:
        rank = running.pop(reference)
        answer = _answer(reference, rank)
        answers[rank.rank] = answer
        if "error" in answer:
            errors[rank.rank] = answer["error"]

    while running and not errors:
        ready, _ = ray.wait([*running, reports], num_returns=1)
        for reference in ready:
            if reference == reports:
                reports = _printed(reports, ranks[0])
            else:
                take(reference)
    if errors:
        end = time.monotonic() + _CAUSE_S
        while running and all(error["peer"] for error in errors.values()) and time.monotonic() < end:
            for reference in ray.wait(list(running), num_returns=1, timeout=1.0)[0]:
                take(reference)
        raise first_error(errors)
    _printed(_printed(reports, ranks[0]), ranks[0])
    return answers[0]


def _started(name: str, job: Job, device: str) -> list[Rank]:
    """Returns the ranks in order, on processes that have said where they run."""
    placement = Placement.of(job, name, job.mesh.world, device, lifetime=None)
    placement.request()
    while (nodes := placement.nodes()) is None:
        if (reason := placement.hopeless()) is not None:
            raise ResourcesError(reason, "use a smaller mesh, or end another run")
        time.sleep(0.05)
    ranks = planned_ranks(Mesh.of(job.mesh), nodes, all_nodes())
    environment = rank_environment(job.resources.model_dump())
    for rank in ranks:
        title = f"raypp/{name}/{rank.label}"
        rank.actor = (
            ray.remote(InferenceWorker)
            .options(
                name=title,
                max_concurrency=_THREADS,
                max_restarts=0,
                num_cpus=job.resources.cpus_per_rank,
                num_gpus=1 if device == "cuda" else 0,
                runtime_env={"env_vars": ACTOR_ENVIRONMENT},
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    cast(PlacementGroup, placement.group), placement_group_bundle_index=rank.bundle
                ),
            )
            .remote(title, environment)
        )
        rank.pending = rank.actor.info.remote()
    for rank in ranks:
        try:
            info = ray.get(rank.pending, timeout=_START_TIMEOUT_S)
        except RayError as error:
            if isinstance(cause := getattr(error, "cause", None), RayppError):
                raise cause from error
            raise first_error(
                {rank.rank: died(rank.rank, f"on {rank.node} did not start: {_in_words(error)}")}
            ) from error
        rank.set_info(info, info.facts.device_index)
    return ranks


def _prepare(request: Mapping[str, Any], rank: Rank) -> None:
    """Lets rank 0 load what it alone needs.

    Raises:
        GenerationError: It cannot.
    """
    answer = _answer(rank.actor.prepare.remote(request), rank)
    if "error" in answer:
        raise first_error({rank.rank: answer["error"]})


def _answer(reference: Any, rank: Rank) -> dict[str, Any]:
    """Returns a rank's answer, or its `error`."""
    try:
        answer: dict[str, Any] = ray.get(reference)
    except RayActorError as error:
        return {"error": died(rank.rank, f"on {rank.node} (pid {rank.pid}) ended: {_in_words(error)}")}
    except RayError as error:
        return {"error": died(rank.rank, f"on {rank.node} failed: {error}")}
    return answer


def _in_words(error: RayError) -> str:
    """Returns the last line of what Ray says."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _printed(call: Any, rank: Rank) -> Any:
    """Prints the reports of a call and returns the next call. `_answer` handles lost ranks."""
    try:
        reports = ray.get(call)
    except RayError:
        reports = []
    for report in reports:
        _print(report)
    if not reports:
        time.sleep(_PAUSE_S)
    return rank.actor.reports.remote(_REPORTS_S)


def _print(report: Mapping[str, Any]) -> None:
    print(json.dumps(report), flush=True)  # noqa: T201


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # Skips Ray's own shutdown, which takes half a second; Ray ends what belongs to the job.
    os._exit(code)
