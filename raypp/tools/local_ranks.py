"""Runs ranks as processes of this machine, without a cluster."""

import json
import multiprocessing
import os
import threading
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from typing import Any, cast

from raypp.control.calls import RankReports, Tell, error_document
from raypp.ports import free_port
from raypp.rank.joining.lost_peer import explained, lost_peer

RankFunction = Callable[..., Any]
"""Called with the rank, the port of the rendezvous, what takes its reports, and the arguments.
Returns plain JSON."""
_CAUSE_S = 5.0


def run_ranks(world: int, function: RankFunction, *arguments: Any, tell: Tell = lambda _report: None) -> Any:
    """Runs a function in `world` processes that end with this one, or here if alone; waits for all.
    `function`: a function of a module that processes can import. `arguments`: passed after the
    rank, the port and `tell`. `tell`: called here with each report of rank 0, and with its
    `answer`. Returns what rank 0's function returned. Raises RayppError: a rank failed; of the rank
    that is the cause."""
    port, reports = free_port(), RankReports(tell, _CAUSE_S)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if world == 1:
        reports.take(0, answered(function, 0, port, tell, *arguments))
        return reports.answer()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([function.__module__])
    processes, waiting = [], {}
    try:
        for rank in range(world):
            here, there = context.Pipe(duplex=False)
            # No daemon: those may not start processes, as lm-evaluation-harness does.
            process = context.Process(target=_rank, args=(rank, port, there, function, arguments), daemon=False)
            process.start()
            there.close()
            processes.append(process)
            waiting[here] = rank
        while waiting and not reports.explained:
            for pipe in cast(list[Connection], wait(list(waiting), timeout=1.0)):
                rank = waiting[pipe]
                try:
                    reports.take(rank, json.loads(pipe.recv_bytes()))
                except EOFError:
                    del waiting[pipe]
                    processes[rank].join()
                    if code := processes[rank].exitcode:
                        reports.died(rank, f"ended with exit code {code}")
    finally:
        for process in processes:
            process.kill()
            process.join()
    return reports.answer()


def answered(function: Callable[..., Any], *arguments: Any) -> dict[str, Any]:
    """Calls a rank's function. Returns its `answer`, or the document of its `error`."""
    try:
        return {"answer": function(*arguments)}
    except BaseException as error:  # noqa: BLE001 - the command that asked shows it
        return {"error": error_document(explained(error) or error, peer=lost_peer(error))}


def _rank(rank: int, port: int, out: Connection, function: RankFunction, arguments: tuple[Any, ...]) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()

    def tell(report: Mapping[str, Any]) -> None:
        out.send_bytes(json.dumps(report).encode())

    tell(answered(function, rank, port, tell, *arguments))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
