"""What a rank does for `raypp generate` and `raypp eval`, on this machine or on a cluster. There is
no controller, no record and no second attempt: a command that failed is typed again."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import chdir, contextmanager, nullcontext
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from raypp.control.calls import Tell
from raypp.environment import need
from raypp.errors import JobError, Problem, ResourcesError
from raypp.job.load import parse_job
from raypp.rank.joining.cuda_settings import prepare_driver
from raypp.rank.own_seat import local_seat
from raypp.records import Seat
from raypp.state.memory.fetch import from_rank_zero
from raypp.tools.inference.eval_job import DATA
from raypp.tools.inference.evaluate import loss_on_seat
from raypp.tools.inference.rank import decode, open_decoder
from raypp.tools.inference.source import Source
from raypp.tools.local_ranks import answered, run_ranks

if TYPE_CHECKING:
    from raypp.tools.inference.task_model import TaskModel

Turn = Callable[[], Mapping[str, Any] | None]
"""Returns the next request of a conversation, when it is there; None: there is none."""


def answer(request: Mapping[str, Any], tell: Tell) -> dict[str, Any]:
    """Uses a model here. Lines of standard input are further turns. `request`, `tell`: `compute`'s.
    Raises ResourcesError: too few GPUs for texts. Raises RayppError: a rank failed."""
    world = parse_job(request["job"]).mesh.world
    prepare_driver()
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if 0 < there < world and "prompts" in request:
        fault = f"pp={world} needs as many GPUs; this machine has {there}"
        fix = "use fewer ranks, or CUDA_VISIBLE_DEVICES= to compute on the CPU"
        raise ResourcesError(Problem("--mesh", fault, fix))
    device, lines = "cuda" if there >= world else "cpu", Connection(os.dup(0), writable=False)
    return dict(run_ranks(world, _compute_here, request, device, lines, tell=tell))


def _compute_here(
    rank: int, port: int, tell: Tell, request: Mapping[str, Any], device: str, lines: Connection
) -> dict[str, Any]:
    job = parse_job(request["job"])
    seat = local_seat(rank, job.mesh.world, port, job, device=device)
    with os.fdopen(lines.fileno(), closefd=False) as turns:
        return compute(request, seat, tell, lambda: json.loads(line) if (line := turns.readline()) else None)


def use_model(request: Mapping[str, Any], seat: Seat, tell: Tell) -> dict[str, Any]:
    """Does what `compute` does, on a cluster. Returns its `answer`, or its `error`'s document."""
    return answered(compute, request, seat, tell)


def compute(request: Mapping[str, Any], seat: Seat, tell: Tell, turn: Turn = lambda: None) -> dict[str, Any]:
    """Does one rank's part of a request. Collective over the ranks. `request`: `source`, `job` and,
    for texts, `prompts` (each as tokens and the most new ones), `choice`, `ends` and `rows` (see
    `decode`). To run tasks: `tasks`, `limit`, `ends` and `folder`. `tell`: called on rank 0 with
    `{"token": [prompt, token, finish]}`, after the texts of a turn with `{"done": …}`; or with
    `{"progress": {"done", "total", "unit"}}`. `turn`: called on rank 0 for more `prompts` with
    their `choice`. Returns on rank 0 the answer of the evaluation; of texts, nothing. Raises
    JobError: no token of the data has a label; there is no such task, or it cannot be loaded."""
    source, job = Source(**request["source"]), parse_job(request["job"])
    if "prompts" in request:
        with open_decoder(source, seat) as decoder:
            asked: Mapping[str, Any] | None = request
            while asked is not None:
                decode(decoder, request, asked, tell)
                asked = turn() if seat.rank == 0 else None
                asked = asked if seat.world_size == 1 else from_rank_zero(asked)
        return {}
    if "tasks" not in request:
        found = loss_on_seat(source, job, seat, tell)
        if found["tokens"] == 0:
            fault = "has no token that follows another one: there is nothing to predict"
            raise JobError(Problem(DATA, fault, "give longer documents"))
        return found
    if seat.rank == 0:
        node = socket.gethostname() if seat.nodes else ""
        need("lm_eval", "eval", "--tasks", node)
        with _as_typed(request):
            from raypp.tools.inference.harness import load_tasks

            load_tasks(request["tasks"], f" on node {node}" if node else "")  # before the model
    from raypp.tools.inference.task_model import ask_on_seat

    def ask(model: TaskModel) -> dict[str, Any]:
        with _as_typed(request):  # only rank 0 imports the harness: other nodes need not have it
            from raypp.tools.inference.harness import results

            return results(source, model, request["tasks"], request["limit"])

    return ask_on_seat(source, job, seat, request["ends"], ask, tell) or {}


@contextmanager
def _as_typed(request: Mapping[str, Any]) -> Iterator[None]:
    """Works in the folder where the command was typed, if it is here, for tasks' relative paths."""
    folder = Path(request["folder"])
    with chdir(folder) if folder.is_dir() else nullcontext():
        yield
