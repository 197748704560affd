"""`python -m raypp.tools.inference.driver`: the entrypoint of a Ray job that uses a model.

`raypp-inference.json` in the working directory is the request. One actor for each rank of its mesh
computes; each reads its part of the weights itself. What rank 0 reports is printed, at last its
answer or an error. Actors and placement group belong to this job: Ray ends them with it.
"""

import json
import os
import queue
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from raypp.control.calls import RankReports, print_report, serve
from raypp.control.credentials import load_private_environment
from raypp.control.package import INFERENCE_FILE
from raypp.control.placement import Placement
from raypp.control.protocol import WorkerInfo, rank_environment
from raypp.control.rank_process import process_title, set_seat_environment, worker_info
from raypp.control.ray_state import all_nodes
from raypp.control.seats import Rank, planned_ranks, seats_for
from raypp.control.worker_group import ACTOR_ENVIRONMENT
from raypp.environment import check_node
from raypp.errors import RayppError, ResourcesError, RunFailedError
from raypp.job.job import Job
from raypp.job.load import parse_job
from raypp.planning.geometry import Mesh
from raypp.records import Seat

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
        """Returns this process' place and a free port. Raises JobError: the node lacks packages."""
        check_node(f"node {socket.gethostname()}")
        return worker_info()

    def run(self, request: Mapping[str, Any], seat: Seat) -> Iterator[list[Mapping[str, Any]]]:
        """Yields what `inference.on_seat.use_model` reports; at last, what it returns."""
        from raypp.tools.inference.on_seat import use_model

        reports = queue.SimpleQueue[Mapping[str, Any]]()
        set_seat_environment(seat)
        with process_title(f"ray::{self._name}"):
            threading.Thread(target=lambda: reports.put(use_model(request, seat, reports.put)), daemon=True).start()
            batch: list[Mapping[str, Any]] = []
            while not batch or batch[-1].keys().isdisjoint(("answer", "error")):
                batch = [reports.get()]
                while not reports.empty():
                    batch.append(reports.get())
                yield batch


def carry_out() -> tuple[()]:
    """Starts the ranks, and prints what rank 0 reports. Raises ResourcesError: the devices did not
    become free. Raises RayppError: a rank failed."""
    check_node(f"the head {socket.gethostname()}")
    request = json.loads(Path(INFERENCE_FILE).read_text())
    job = parse_job(request["job"])
    ranks = _started(request["name"], job, request["device"])
    seats = seats_for(request["name"], 1, Mesh.of(job.mesh), ranks, request["device"])
    streams: dict[Any, Rank] = {
        rank.actor.run.options(num_returns="streaming").remote(request, seat): rank
        for rank, seat in zip(ranks, seats, strict=True)
    }
    reports = RankReports(print_report, _CAUSE_S)
    while streams and not reports.explained:
        ready: list[Any] = ray.wait(list(streams), num_returns=1, timeout=1.0)[0]
        for stream in ready:
            rank = streams[stream]
            try:
                for report in ray.get(next(stream)):
                    reports.take(rank.rank, report)
            except StopIteration:
                del streams[stream]
            except RayError as error:
                del streams[stream]
                reports.died(rank.rank, f"on {rank.node} (pid {rank.pid}) ended: {_in_words(error)}")
    reports.answer()
    return ()


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
        options = {"name": title, "max_restarts": 0, "runtime_env": {"env_vars": ACTOR_ENVIRONMENT}}
        actor = ray.remote(InferenceWorker).options(**options, **placement.options(rank.bundle))
        rank.actor = actor.remote(title, rank_environment(job.resources.model_dump()))
        rank.pending = rank.actor.info.remote()
    for rank in ranks:
        try:
            info = ray.get(rank.pending, timeout=_START_TIMEOUT_S)
        except RayError as error:
            if isinstance(cause := getattr(error, "cause", None), RayppError):
                raise cause from error
            words = f"the process of rank {rank.rank} on {rank.node} did not start: {_in_words(error)}"
            raise RunFailedError(words) from error
        rank.set_info(info, info.facts.device_index)
    return ranks


def _in_words(error: RayError) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


if __name__ == "__main__":
    from raypp.tools.inference import driver as inference_driver  # under its name, by which nodes import the actor

    serve(inference_driver.carry_out)
