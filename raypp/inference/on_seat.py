"""What a rank does that a cluster has given a seat: it evaluates a model, or generates with it.

There is no controller, no record and no second attempt: Ray ends actors and placement group with
the job, and a command that failed is typed again.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raypp.environment import need
from raypp.inference.evaluate import Tell, checked, loss_on_seat
from raypp.inference.processes import error_document
from raypp.inference.rank import answer_request, open_decoder
from raypp.inference.source import Source
from raypp.records import Seat
from raypp.spec.load import parse_job
from raypp.train.lost_peer import explained, lost_peer

if TYPE_CHECKING:
    from raypp.inference.task_model import TaskModel


def prepare(request: Mapping[str, Any]) -> dict[str, Any]:
    """Loads the tasks of a request and their data, in the process that will be rank 0.

    No rank waits for it yet, and nothing of the model is loaded: data may be large, names wrong.

    Returns:
        Nothing, or `error`.
    """
    try:
        node = socket.gethostname()
        need("lm_eval", "eval", "--tasks", node)
        with _as_typed(request):
            from raypp.inference.harness import load_tasks

            load_tasks(request["tasks"], f" on node {node}")
    except Exception as error:  # noqa: BLE001 - the command that asked shows it
        return {"error": error_document(error, peer=False)}
    return {}


def use_model(request: Mapping[str, Any], seat: Seat, tell: Tell) -> dict[str, Any]:
    """Does one rank's part of a request. Collective over the ranks.

    Args:
        request: `source` and, to evaluate, `job`; with `tasks`, `limit`, `ends` and `folder` also
            tasks. Or `prompts`, `choice`, `ends` and `rows` as `Generators` sends them.
        seat: This rank's seat.
        tell: Called on rank 0 with each new token or the progress, as the local commands' processes
            print them.

    Returns:
        Rank 0's last line: the answer of the evaluation, or `done`. Or `error`, on any rank.
    """
    try:
        source = Source(**request["source"])
        if "tasks" in request:
            return _tasks(source, request, seat, tell)
        if "prompts" not in request:
            answer = loss_on_seat(source, parse_job(request["job"]), seat, tell)
            return checked(answer)
        with open_decoder(source, seat) as decoder:
            answer_request(decoder, request, request, tell)
        return {"done": len(request["prompts"])}
    except Exception as error:  # noqa: BLE001 - the command that asked shows it
        return {"error": error_document(explained(error) or error, peer=lost_peer(error))}


def _tasks(source: Source, request: Mapping[str, Any], seat: Seat, tell: Tell) -> dict[str, Any]:
    """Runs tasks. Only rank 0 imports the harness: other nodes need not have it."""
    from raypp.inference.task_model import ask_on_seat

    def ask(model: TaskModel) -> dict[str, Any]:
        with _as_typed(request):
            from raypp.inference.harness import results

            return results(source, model, request["tasks"], request["limit"])

    return ask_on_seat(source, parse_job(request["job"]), seat, request["ends"], ask, tell) or {}


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
