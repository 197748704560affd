"""`python -m raypp.control.driver`: the entrypoint of a run's Ray job.

It starts the run's controller (or finds it), prints its lines, and exits with the run's exit code.
`raypp-run.json` in the working directory names the run. SIGTERM (`ray job stop`) ends the run
without a checkpoint.

`python -m raypp.control.driver RUN URL METHOD ARGUMENTS` calls a method of the controller of a
run, which is stored at URL, and reports the answer.
"""

import contextlib
import importlib
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from raypp.control.calls import serve
from raypp.control.clusters.known_runs import cluster_name
from raypp.control.credentials import forget, load_private_environment
from raypp.control.on_end import tell_end
from raypp.control.protocol import NAMESPACE, REQUEST_FILE, RunRequest
from raypp.environment import check_node
from raypp.errors import EXIT_RUN_FAILED, JobError, RayppError, words_after_stack
from raypp.quick_import import quick_import
from raypp.records import RunState
from raypp.retry import Backoff
from raypp.state.checkpoint.run_spec import RunEnd, newest_number, read_end, write_end
from raypp.state.run_records.status import NO_CONTROLLER
from raypp.storage import open_store
from raypp.untrusted.text import visible_lines

_LOST_S = 60.0
_PATIENCE_S = 120.0
_WAIT_S = 60.0
"""How long one command waits for a save or an end; then it is given again."""
_ASK_AGAIN_S = 0.2  # a restarted controller may end its run, and leave, within a second


def main(arguments: list[str]) -> int:
    """Follows a run or sends a command to it; returns the exit code."""
    try:
        check_node(f"the head {socket.gethostname()}")
    except JobError as error:
        print(visible_lines(str(error)), file=sys.stderr, flush=True)  # noqa: T201
        return error.exit_code
    if arguments:
        run, url, method, values = arguments
        serve(lambda: [command(run, url, method, json.loads(values))])
    request = RunRequest(**json.loads(Path(REQUEST_FILE).read_text()))
    ray = quick_import("ray")
    ray.init(namespace=NAMESPACE, log_to_driver=False, logging_level=logging.WARNING)
    load_private_environment()
    return _follow_run(request)


def command(run: str, url: str, method: str, arguments: Sequence[Any]) -> dict[str, Any]:
    """Calls a method of a run's controller, which waits for its task, for a minute at most.

    While the controller restarts it is called again, so the controller may get it twice: a run has
    one stop and one trace at a time, and a second save is of a later step. `url`: of its store, in
    the store's own form. `method`: save | stop | timeline | facts. `arguments`: those after
    `patience_s`. Returns `found`: whether there is a controller; and what the method returns."""
    import ray

    end = time.monotonic() + _PATIENCE_S
    try:
        controller = ray.get_actor(f"raypp/{cluster_name(url, run)}", namespace=NAMESPACE)
    except ValueError:
        return {"found": False}

    def ask() -> dict[str, Any]:
        patience_s = min(max(1.0, end - time.monotonic()), _WAIT_S)
        answer: dict[str, Any] = ray.get(getattr(controller, method).remote(patience_s, *arguments))
        return answer

    return answer_of(ask, _PATIENCE_S)


def answer_of(ask: Callable[[], dict[str, Any]], patience_s: float) -> dict[str, Any]:
    """Returns the answer of a controller, and that it was found; asks again while it restarts.
    Raises ActorUnavailableError: it has not come back."""
    from ray.exceptions import ActorUnavailableError, RayActorError

    again = Backoff(patience_s, _ASK_AGAIN_S, _ASK_AGAIN_S)
    try:
        return {"found": True, **again.call(ask, lambda error: isinstance(error, ActorUnavailableError))}
    except ActorUnavailableError:
        raise
    except RayActorError:
        return {"found": False}


def _controller(request: RunRequest) -> Any:
    """Returns the run's controller: a new one, or the existing one when this driver is not its
    first. Raises RayActorError: its constructor failed, or every new one has ended for a minute."""
    import ray

    from raypp.control.controller import Controller

    dying_since: float | None = None
    while True:
        controller = on_the_head(Controller, f"raypp/{request.cluster_name}", 128, request)
        try:
            if not ray.get(controller.over_for_another.remote(request.submission_id)):
                return controller
        except ray.exceptions.RayActorError as error:  # it has just exited
            dying_since = dying_since or time.monotonic()
            if error.actor_init_failed or time.monotonic() - dying_since > _LOST_S:
                raise
        time.sleep(0.2)


def on_the_head(kind: type, name: str, threads: int, *arguments: Any) -> Any:
    """Returns the detached actor of a name, which Ray restarts; makes it if there is none. It is on
    this driver's node, the head, whose end is the end of the cluster anyway."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    actor: Any = ray.remote(kind).options(
        name=name,
        namespace=NAMESPACE,
        lifetime="detached",
        scheduling_strategy=NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True),
        memory=1,  # byte: Ray puts an actor that needs nothing on a random node
        get_if_exists=True,
        max_restarts=-1,
        num_cpus=0,
        max_concurrency=threads,
    )
    return actor.remote(*arguments)


def why_no_controller(error: str) -> tuple[str, int]:
    """Returns why a controller could not be started, and the exit code of that. `error`: what Ray
    says of the actor's end. Ray keeps only the text of an error in a constructor: the traceback,
    whose last lines begin with the error's type."""
    words = words_after_stack(error) or "".join(error.rstrip().splitlines()[-1:])
    module, _, name = words.partition(": ")[0].rpartition(".")
    kind = None
    if module.startswith("raypp."):
        with contextlib.suppress(ImportError):
            kind = getattr(importlib.import_module(module), name, None)
    if isinstance(kind, type) and issubclass(kind, RayppError):
        return words.partition(": ")[2], kind.exit_code
    return words, EXIT_RUN_FAILED


def why_not_after(runs: Sequence[str]) -> str:
    """Returns why a run may not start: one of these (URL/NAME) has not succeeded before; or ""."""
    for url, name in (run.rsplit("/", 1) for run in runs):
        try:
            end = read_end(open_store(url), name)
        except RayppError as error:
            return f"how {name} ended, which had to succeed before, cannot be read: {error}"
        if end is None or end.state is not RunState.SUCCEEDED:
            how = "has no recorded end" if end is None else f"is {end.state} after step {end.step}"
            reason = f" ({end.reason})" if end is not None and end.reason else ""
            return (
                f"{name} had to succeed before, and {how}{reason}; `raypp submit JOB --resume` starts this run anyway"
            )
    return ""


def _follow_run(request: RunRequest) -> int:
    import ray

    controller: Any = None
    try:
        words, code = why_not_after(request.after), EXIT_RUN_FAILED
        if not words:
            controller = _controller(request)
    except ray.exceptions.RayActorError as error:
        words, code = why_no_controller(str(error))
        words = NO_CONTROLLER + words
    if words:
        print(visible_lines(words), file=sys.stderr, flush=True)  # noqa: T201
        end = RunEnd(request.run, RunState.FAILED, code, reason=words)
        _record_end(request, end)
        for failure in tell_end(request.job, end):
            print(visible_lines(failure), file=sys.stderr, flush=True)  # noqa: T201
        forget()
        return code

    def on_term(_signal: int, _frame: FrameType | None) -> None:
        controller.stop.remote(0.0, False)

    signal.signal(signal.SIGTERM, on_term)
    outcome = _follow(controller) or _recorded_end(request)
    if outcome is None:
        print("the run's controller is gone; `raypp status` shows how far the run got", file=sys.stderr)  # noqa: T201
        return 1
    reason = outcome.reason or f"step {outcome.step}"
    print(f"{outcome.state.lower()}: {visible_lines(reason)}", flush=True)  # noqa: T201
    return outcome.exit_code


def _recorded_end(request: RunRequest) -> RunEnd | None:
    """Returns how the submission ended, if its store says so. A controller that has heard nothing
    from its driver for some seconds does not wait for it."""
    with contextlib.suppress(RayppError):
        return read_end(open_store(request.job["checkpoint"]["url"]), request.run, request.number or None)
    return None


def _record_end(request: RunRequest, end: RunEnd) -> None:
    """Records that the submission ended before anybody led it, if the store can be reached."""
    with contextlib.suppress(RayppError):
        store = open_store(request.job["checkpoint"]["url"])
        write_end(store, end, request.number or newest_number(store, request.run))


def _follow(controller: Any) -> RunEnd | None:
    """Prints the controller's lines until it returns the outcome; None when it is gone for good."""
    import ray

    cursor = 0
    silent_since: float | None = None
    while True:
        try:
            answer: tuple[list[str], int, RunEnd | None] = ray.get(controller.follow.remote(cursor), timeout=30)
            lines, cursor, outcome = answer
            silent_since = None
        except ray.exceptions.GetTimeoutError:
            continue
        except ray.exceptions.ActorUnavailableError:
            cursor = 0  # a restarted controller numbers its lines from 0
            silent_since = silent_since or time.monotonic()
            if time.monotonic() - silent_since > _LOST_S:
                return None
            time.sleep(0.5)
            continue
        except ray.exceptions.RayActorError:
            return None
        for line in lines:
            print(visible_lines(line).replace("\n", "\n    "), flush=True)  # noqa: T201
        if outcome is not None:
            return outcome


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    # Skips Ray's own shutdown, which takes half a second.
    os._exit(code)
