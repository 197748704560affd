"""What a rank does for `raypp generate` and `raypp eval`, on this machine or on a cluster. There is
no controller, no record and no second attempt: a command that failed is typed again."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Mapping
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from raypp.environment import need
from raypp.errors import JobError, Problem
from raypp.job.load import parse_job
from raypp.ports import free_port
from raypp.rank.joining.cuda_settings import prepare_driver
from raypp.rank.joining.lost_peer import explained, lost_peer
from raypp.rank.own_seat import local_seat
from raypp.records import Seat
from raypp.tools.inference.eval_job import DATA
from raypp.tools.inference.evaluate import Tell, loss_on_seat
from raypp.tools.inference.processes import error_document
from raypp.tools.inference.rank import answer_request, open_decoder
from raypp.tools.inference.source import Source
from raypp.tools.local_ranks import run_ranks

if TYPE_CHECKING:
    from raypp.tools.inference.task_model import TaskModel


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """Evaluates a model on this machine: one process for each rank, this one if it is alone. Prints
    lines `{"progress": {"done", "total", "unit"}}` on the way. `request`: as `compute` takes it, to
    evaluate. Raises JobError: no token of the data has a label; there is no such task, or it cannot
    be loaded. Raises RunFailedError: a rank failed."""
    if "tasks" in request:
        from raypp.tools.inference.harness import load_tasks

        load_tasks(request["tasks"])  # before the model
    world = parse_job(request["job"]).mesh.world
    prepare_driver()
    device = "cuda" if torch.cuda.is_available() and torch.cuda.device_count() >= world else "cpu"
    if world == 1:
        return _checked(_compute_here(0, free_port(), request, device))
    return _checked(run_ranks(world, _compute_here, request, device, patience_s=None))


def _compute_here(rank: int, port: int, request: Mapping[str, Any], device: str) -> dict[str, Any]:
    job = parse_job(request["job"])
    seat = local_seat(rank, job.mesh.world, port, job, device=device)
    return compute(request, seat, lambda report: print(json.dumps(report), flush=True))  # noqa: T201


def _checked(found: dict[str, Any]) -> dict[str, Any]:
    if found.get("tokens") == 0:
        fault = "has no token that follows another one: there is nothing to predict"
        raise JobError(Problem(DATA, fault, "give longer documents"))
    return found


def use_model(request: Mapping[str, Any], seat: Seat, tell: Tell) -> dict[str, Any]:
    """Does what `compute` does, on a cluster. An exception becomes `error`."""
    try:
        if "tasks" in request and seat.rank == 0:
            node = socket.gethostname()
            need("lm_eval", "eval", "--tasks", node)
            with _as_typed(request):
                from raypp.tools.inference.harness import load_tasks

                load_tasks(request["tasks"], f" on node {node}")  # before the model
        return _checked(compute(request, seat, tell))
    except Exception as error:  # noqa: BLE001 - the command that asked shows it
        return {"error": error_document(explained(error) or error, peer=lost_peer(error))}


def compute(request: Mapping[str, Any], seat: Seat, tell: Tell) -> dict[str, Any]:
    """Does one rank's part of a request. Collective over the ranks. `request`: `source` and, to
    evaluate, `job`; with `tasks`, `limit`, `ends` and `folder` also tasks. Or `prompts`, `choice`,
    `ends` and `rows` as `Generators` sends them. `tell`: called on rank 0 with each new token or
    the progress. Returns on rank 0 the answer of the evaluation, or `done`."""
    source = Source(**request["source"])
    if "prompts" in request:
        with open_decoder(source, seat) as decoder:
            answer_request(decoder, request, request, tell)
        return {"done": len(request["prompts"])}
    job = parse_job(request["job"])
    if "tasks" not in request:
        return loss_on_seat(source, job, seat, tell)
    from raypp.tools.inference.task_model import ask_on_seat

    def ask(model: TaskModel) -> dict[str, Any]:
        with _as_typed(request):  # only rank 0 imports the harness: other nodes need not have it
            from raypp.tools.inference.harness import results

            return results(source, model, request["tasks"], request["limit"])

    return ask_on_seat(source, job, seat, request["ends"], ask, tell) or {}


@contextmanager
def _as_typed(request: Mapping[str, Any]) -> Iterator[None]:
    """Works in the folder where the command was typed, if this node has it: tasks may name data by
    relative paths."""
    folder = Path(request["folder"])
    if not folder.is_dir():
        yield
        return
    with chdir(folder):
        yield
