"""Runs a module of raypp in a cluster and passes on what it prints: how commands ask controllers,
examine nodes, and use models there. On the embedded cluster a process of this machine can do it;
elsewhere it is a Ray job, so that only the dashboard's address is needed."""

import contextlib
import json
import os
import secrets
import shlex
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from raypp.control.calls import REPORT, error_of, last_answer
from raypp.control.clusters.dashboard import FINAL_JOB_STATES, DashboardError
from raypp.control.clusters.find import Cluster
from raypp.control.credentials import deposit
from raypp.control.package import build_package
from raypp.errors import Problem, RayppError, RunFailedError, UnreachableError

_POLL_S, _LONGEST_POLL_S = 0.1, 2.0
_SHARE = 0.1
"""Share of the time spent asking the dashboard, which always sends the whole log."""
_STOP_S = 15.0
_SHOWN, _SHOWN_LINES = 2000, 5


class CallFailedError(RunFailedError):
    """A called module ended early; the message has the end of what it printed."""


@dataclass(frozen=True)
class Call:
    """What is to run. `module`: with a `__main__` part. `secrets`, `settings`: environment
    variables for a Ray job. `files`: more files in the package of a Ray job: names and contents.
    `always_job`: it needs the package, also on the embedded cluster."""

    title: str
    module: str
    arguments: Sequence[str] = ()
    secrets: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    files: Sequence[tuple[str, bytes]] = ()
    timeout_s: float = 180.0
    always_job: bool = False


def lines_of(cluster: Cluster, call: Call) -> Generator[str]:
    """Yields the lines that a call prints, those of libraries among them. A caller that closes the
    iterator ends the call. Raises UnreachableError: the cluster does not answer, refuses the job,
    or takes too long. Raises CallFailedError: the call ended without success."""
    if cluster.embedded is None or call.always_job:
        yield from _of_job(cluster, call)
    else:
        yield from _of_process(call, cluster.embedded.ray_environment())


def reports_of(cluster: Cluster, call: Call) -> Generator[dict[str, Any]]:
    """Yields what a call reports, as `lines_of` its lines. Raises RayppError: it reports an error.
    Raises CallFailedError: it ended without an answer; the message has what it printed last."""
    answered = False
    others: deque[str] = deque(maxlen=_SHOWN_LINES)
    try:
        with closing(lines_of(cluster, call)) as lines:
            for line in lines:
                other, found, text = line.partition(REPORT)  # after a progress bar without a line break, too
                if other.strip():
                    others.append(other)
                if not found:
                    continue
                report = json.loads(text)
                if "error" in report:
                    raise error_of(report["error"])
                answered |= "answer" in report
                yield report
    except CallFailedError:
        if not answered:
            raise
    if not answered:
        raise CallFailedError("\n".join(others) or "it ended without an answer")


def ask(cluster: Cluster, call: Call, progress: Callable[[Any], None] = lambda _what: None) -> dict[str, Any]:
    """Returns the answer of a call. Raises UnreachableError: there is none; the message has the end
    of what it printed instead."""
    try:
        return dict(last_answer(reports_of(cluster, call), progress))
    except CallFailedError as error:
        tail = "\n".join(str(error).splitlines()[-_SHOWN_LINES:])
        raise UnreachableError(Problem("address", f"the cluster could not be asked: {tail}")) from None


def python_of(cluster: Cluster) -> str:
    """Returns the interpreter of a job's driver: this one if the head is here, else `python`."""
    if cluster.embedded is not None:
        return shlex.quote(cluster.embedded.python)
    here = any(node.head and node.hostname == socket.gethostname() for node in cluster.dashboard.nodes())
    return shlex.quote(sys.executable) if here else "python"


def refused(error: DashboardError) -> UnreachableError:
    """Returns the error of a job that the cluster does not accept."""
    return UnreachableError(Problem("address", f"the cluster refused the job: {error}"))


def _of_process(call: Call, variables: Mapping[str, str]) -> Generator[str]:
    own = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    command = [sys.executable, "-m", call.module, *call.arguments]
    begun = time.monotonic()
    with (
        tempfile.TemporaryFile("w+", errors="replace") as errors,
        subprocess.Popen(
            command, env={**own, **variables}, stdout=subprocess.PIPE, stderr=errors, text=True, errors="replace"
        ) as process,
    ):
        assert process.stdout is not None
        late = threading.Timer(call.timeout_s, process.kill)
        late.start()
        try:
            for line in process.stdout:
                yield line.rstrip("\n")
            code = process.wait()
        finally:
            late.cancel()
            process.kill()
        if time.monotonic() - begun >= call.timeout_s:
            raise _too_slow(call)
        if code:
            errors.seek(0)
            raise CallFailedError(errors.read()[-_SHOWN:].strip() or f"it ended with exit code {code}")


def _of_job(cluster: Cluster, call: Call) -> Generator[str]:
    dashboard, end = cluster.dashboard, time.monotonic() + call.timeout_s
    package = build_package(None, call.files)
    arguments = "".join(f" {shlex.quote(one)}" for one in call.arguments)
    word = call.title.partition(" ")[0]
    try:
        submission_id = dashboard.submit_job(
            {
                "entrypoint": f"{python_of(cluster)} -m {call.module}{arguments}",
                "submission_id": f"raypp-{word}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}",
                "runtime_env": {
                    "working_dir": dashboard.upload_package(*package),
                    "env_vars": {**call.settings, **deposit(dashboard, call.secrets), "PYTHONUNBUFFERED": "1"},
                },
                "metadata": {"job_name": call.title},
            }
        )
    except DashboardError as error:
        raise refused(error) from None
    read, ended, log = 0, False, ""
    try:
        while not ended:
            began = time.monotonic()
            job = dashboard.job(submission_id)
            ended = job is None or job["status"] in FINAL_JOB_STATES
            log = dashboard.job_logs(submission_id) if job is not None else log
            upto = len(log) if ended else log.rfind("\n") + 1
            yield from log[read:upto].split("\n")
            read = max(read, upto)
            if not ended:
                if began > end:
                    raise _too_slow(call)
                time.sleep(min(_LONGEST_POLL_S, max(_POLL_S, (time.monotonic() - began) / _SHARE)))
    finally:
        if not ended:
            _stop(cluster, submission_id)
    if job is None or job["status"] != "SUCCEEDED":
        state = str((job or {}).get("message") or "it no longer exists")
        raise CallFailedError(f"the Ray job {submission_id} ended early: {state}\n{log.strip()[-_SHOWN:]}".strip())


def _stop(cluster: Cluster, submission_id: str) -> None:
    """Stops a job and waits until it has ended, which frees its devices."""
    with contextlib.suppress(RayppError):
        cluster.dashboard.stop_job(submission_id)
        end = time.monotonic() + _STOP_S
        while time.monotonic() < end:
            job = cluster.dashboard.job(submission_id)
            if job is None or job["status"] in FINAL_JOB_STATES:
                return
            time.sleep(0.1)


def _too_slow(call: Call) -> UnreachableError:
    word = call.title.partition(" ")[0]
    fault = f"the cluster did not carry out `{word}` in {call.timeout_s:.0f} s"
    fix = "`ray status` on a node shows whether the cluster works; try again"
    return UnreachableError(Problem("address", fault, fix))
