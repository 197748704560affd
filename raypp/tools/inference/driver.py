"""`python -m raypp.tools.inference.driver`: the entrypoint of a Ray job that uses a model.

`raypp-inference.json` in the working directory is the request. One actor for each rank of its mesh
computes; each reads its part of the weights itself. Standard output has what rank 0 reports, one
JSON object on each line that begins with `REPORT`. The last one is the answer, or `error`. Actors
and placement group belong to this job: Ray ends them with it.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raypp.control.credentials import forget, load_private_environment
from raypp.control.package import INFERENCE_FILE, REPORT
from raypp.control.placement import Placement
from raypp.control.protocol import NAMESPACE, WorkerInfo, rank_environment
from raypp.control.rank_process import process_title, set_seat_environment, worker_info
from raypp.control.ray_nodes import all_nodes
from raypp.control.seats import Rank, planned_ranks, seats_for
from raypp.control.worker_group import ACTOR_ENVIRONMENT
from raypp.environment import check_node
from raypp.errors import EXIT_OK, RayppError, ResourcesError
from raypp.job.job import Job
from raypp.job.load import parse_job
from raypp.planning.geometry import Mesh
from raypp.records import Seat
from raypp.tools.inference.processes import died, error_document, first_error

_START_TIMEOUT_S = 180.0
_CAUSE_S = 90.0
"""Seconds to wait for the cause when ranks only report lost peers. Ray reports a lost node late."""


class InferenceWorker:
    """The process of one rank."""

    def __init__(self, name: str, environment: Mapping[str, str]) -> None:
        self._name = name
        load_private_environment()
        os.environ.update(environment)

    def __repr__(self) -> str:
        return self._name

    def info(self) -> WorkerInfo:
        """Returns where this process runs, and a port of its node that is free now. Raises
        JobError: the node lacks what raypp needs."""
        check_node(f"node {socket.gethostname()}")
        return worker_info()

    def run(self, request: Mapping[str, Any], seat: Seat) -> Iterator[list[Mapping[str, Any]]]:
        """Yields what `inference.on_seat.use_model` reports, as it comes; at last, its answer."""
        from raypp.tools.inference.on_seat import use_model

        reports = queue.SimpleQueue[Mapping[str, Any] | None]()

        def compute() -> None:
            try:
                reports.put(use_model(request, seat, reports.put))
            finally:
                reports.put(None)

        set_seat_environment(seat)
        with process_title(f"ray::{self._name}"):
            threading.Thread(target=compute, daemon=True).start()
            while (report := reports.get()) is not None:
                batch = [report]
                while not reports.empty() and (report := reports.get()) is not None:
                    batch.append(report)
                yield batch
                if report is None:
                    return


def main() -> int:
    """Carries out the request; returns the exit code."""
    try:
        check_node(f"the head {socket.gethostname()}")
        ray.init(namespace=NAMESPACE, log_to_driver=False, logging_level=logging.WARNING)
        load_private_environment()
        carry_out(json.loads(Path(INFERENCE_FILE).read_text()))
    except RayppError as error:
        _print({"error": error_document(error, peer=False)})
        return error.exit_code
    finally:
        forget()
    return EXIT_OK


def carry_out(request: Mapping[str, Any]) -> None:
    """Starts the ranks, and prints what rank 0 reports. Raises ResourcesError: the devices did not
    become free. Raises GenerationError: a rank failed."""
    job = parse_job(request["job"])
    ranks = _started(request["name"], job, request["device"])
    seats = seats_for(request["name"], 1, Mesh.of(job.mesh), ranks, request["device"])
    streams: dict[Any, Rank] = {
        rank.actor.run.options(num_returns="streaming").remote(request, seat): rank
        for rank, seat in zip(ranks, seats, strict=True)
    }
    errors: dict[int, Mapping[str, Any]] = {}
    failed_at = 0.0
    while streams:
        ready: list[Any] = ray.wait(list(streams), num_returns=1, timeout=1.0)[0]
        for stream in ready:
            rank = streams[stream]
            try:
                reports = ray.get(next(stream))
            except StopIteration:
                del streams[stream]
                continue
            except RayError as error:
                del streams[stream]
                reports = [{"error": died(rank.rank, f"on {rank.node} (pid {rank.pid}) ended: {_in_words(error)}")}]
            for report in reports:
                if "error" in report:
                    errors[rank.rank] = report["error"]
                elif rank.rank == 0:
                    _print(report)
        if errors:
            failed_at = failed_at or time.monotonic()
            if time.monotonic() - failed_at > _CAUSE_S or not all(error["peer"] for error in errors.values()):
                break
    if errors:
        raise first_error(errors)


def _started(name: str, job: Job, device: str) -> list[Rank]:
    """Returns the ranks in order, on processes that have said where they run."""
    placement = Placement.of(job, name, job.mesh.world, device, lifetime=None)
    placement.request()
    while (nodes := placement.nodes()) is None:
        if (reason := placement.hopeless()) is not None:
            raise ResourcesError(reason, "use a smaller mesh, or end another run")
        time.sleep(0.05)
    ranks = planned_ranks(Mesh.of(job.mesh), nodes, all_nodes())
    for rank in ranks:
        title = f"raypp/{name}/{rank.label}"
        bundle = PlacementGroupSchedulingStrategy(cast(PlacementGroup, placement.group), rank.bundle)
        options = {
            "name": title,
            "max_restarts": 0,
            "num_cpus": job.resources.cpus_per_rank,
            "num_gpus": 1 if device == "cuda" else 0,
            "runtime_env": {"env_vars": ACTOR_ENVIRONMENT},
            "scheduling_strategy": bundle,
        }
        actor = ray.remote(InferenceWorker).options(**options)
        rank.actor = actor.remote(title, rank_environment(job.resources.model_dump()))
        rank.pending = rank.actor.info.remote()
    for rank in ranks:
        try:
            info = ray.get(rank.pending, timeout=_START_TIMEOUT_S)
        except RayError as error:
            if isinstance(cause := getattr(error, "cause", None), RayppError):
                raise cause from error
            why = f"on {rank.node} did not start: {_in_words(error)}"
            raise first_error({rank.rank: died(rank.rank, why)}) from error
        rank.set_info(info, info.facts.device_index)
    return ranks


def _in_words(error: RayError) -> str:
    """Returns the last line of what Ray says."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _print(report: Mapping[str, Any]) -> None:
    print(REPORT + json.dumps(report), flush=True)  # noqa: T201


if __name__ == "__main__":
    from raypp.tools.inference import driver as inference_driver  # under its name, by which nodes import the actor

    code = inference_driver.main()
    sys.stdout.flush()
    # Skips Ray's own shutdown, which takes half a second; Ray ends what belongs to the job.
    os._exit(code)
