"""The actor of one rank, which takes one seat after the other. Reaches the runtime by one line. It
says which kind of failure ended its rank, and ends itself without a run."""

import contextlib
import dataclasses
import errno
import gc
import importlib
import os
import socket
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import psutil
import ray

from raypp.control import process_evidence
from raypp.control.credentials import load_private_environment, scrubbed
from raypp.control.group_test import run_group
from raypp.control.process_evidence import DeathEvidence, within_rank_frame
from raypp.control.process_log import say, say_exception
from raypp.control.protocol import NAMESPACE, RankEnd, RunRequest, WorkerInfo, WorkerStatus, rank_environment
from raypp.control.rank_process import on_sigterm, process_title, set_seat_environment, worker_info
from raypp.control.ray_state import holds_devices, remove_groups_of
from raypp.control.report.reporter import ControllerReporter, LogTail
from raypp.environment import check_node
from raypp.errors import RayppError, causes, origin_in_words
from raypp.failure_kinds import FailureKind
from raypp.planning.decision import Decision
from raypp.records import RankFailure, RankResult, Reporter, Seat

RankFunction = Callable[[Decision, Seat, Reporter], RankResult]

_CUT_EVERY_S = 0.05
_INTERRUPT_S = 10.0
_LAST_SAVE_S = 120.0
_OTHERS_LAST_SAVE_S = 5.0
_OWN_THREADS = "raypp-"
_LASTING_THREADS = "raypp-memory"
"""Threads of the runtime that may outlive a seat: they serve snapshots to the next rank."""

_FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_HOST_MEMORY = ("DefaultCPUAllocator: can't allocate memory", "Cannot allocate memory", "pthread_create failed")
_LONGEST_CAUSE, _LONGEST_DETAILS = 2000, 8000

_INTERVAL_S = 5.0
_ANSWER_S = 10.0
_INTERVAL_S_PER_RANK = 0.03


class Worker:
    """One process of a run. Ray calls its methods in threads of their own; the rank has another.

    It has one seat at a time, none between attempts: imports and connections are paid once. Without
    a controller for `orphan_timeout_s` it saves, exits and removes the run's groups. `request`: of
    its run. The module of a `rank_function` may have a `leave(seat)`, which interrupts it. `label`:
    the coordinates planned for it, or `standby`. `ask_interval_s`: seconds between two checks of a
    controller that has not answered."""

    def __init__(self, request: RunRequest, label: str, controller: Any, ask_interval_s: float) -> None:
        self._run = request.run
        self._cluster_name = request.cluster_name
        self._name = f"raypp/{request.cluster_name}/{label}"
        self._controller = controller
        self._rank_function = request.rank_function
        self._changed = threading.Condition()
        self._seat: Seat | None = None
        self._bundle: int | None = None
        self._end: RankEnd | None = None
        self._leaving = 0
        self._interrupting = 0
        self._asked = 0
        self._reporter: ControllerReporter | None = None
        self._thread: threading.Thread | None = None
        self._tails = (LogTail(1, "out"), LogTail(2, "err"))
        load_private_environment()
        os.environ.update(rank_environment(request.job["resources"]))
        process_evidence.prepare()
        on_sigterm(self._report_preemption)
        timeout_s = request.job["recovery"]["orphan_timeout_s"]
        self._orphan_watch = OrphanWatch(controller, timeout_s, self._exit_as_orphan, ask_interval_s)
        # Importing torch takes longer than everything else before the first seat is given out.
        threading.Thread(target=self._import_early, daemon=True).start()

    def __repr__(self) -> str:
        return self._name

    # What the controller calls --------------------------------------------------------------------

    def info(self) -> WorkerInfo:
        """Returns where this process runs, and a port of its node that is free now."""
        return worker_info()

    def status(self) -> WorkerStatus:
        """Returns what a restarted controller needs to take this worker over."""
        return WorkerStatus(self.info(), self._bundle, self._seat)

    def begin(self, decision: dict[str, Any], seat: Seat, bundle: int) -> None:
        """Takes a seat and starts the rank in its own thread; `outcome` returns how it ends. Raises
        RuntimeError: the rank of the last seat has not ended."""
        with self._changed:
            if self._seat is not None and self._end is None:
                raise RuntimeError(f"still in attempt {self._seat.attempt}")
            if not self._changed.wait_for(lambda: not self._interrupting, _INTERRUPT_S):
                raise RuntimeError("the interruption of its last attempt has not ended")
            self._seat, self._bundle, self._end = seat, bundle, None
            self._thread = threading.Thread(
                target=within_rank_frame, args=(lambda: self._run_seat(decision, seat),), name="rank", daemon=True
            )
            self._thread.start()

    def outcome(self, attempt: int, timeout_s: float = 30.0) -> RankEnd | None:
        """Returns how an attempt's rank ended; None if it still runs after `timeout_s`. May be
        called again, also by a restarted controller; an earlier call then returns None."""
        self._orphan_watch.answered(time.monotonic())
        with self._changed:
            asked = self._asked = self._asked + self._is_in(attempt)
            self._changed.notify_all()

            def over() -> bool:
                if not self._is_in(attempt):
                    return self._seat is not None and self._seat.attempt > attempt >= 0
                return self._end is not None or self._asked != asked

            self._changed.wait_for(over, timeout_s)
            return self._end if self._is_in(attempt) else None

    def leave(self, attempt: int, timeout_s: float = 10.0) -> None:
        """Makes the rank of that attempt end soon, whatever it waits for; `outcome` says how."""
        seat, thread = self._seat, self._thread
        if seat is None or thread is None or seat.attempt < attempt:
            self._leaving = attempt  # Ray may deliver this call before the seat itself
            return
        if seat.attempt != attempt:
            return
        self._leaving = attempt
        end = time.monotonic() + timeout_s
        # Repeated, because the rank may be about to make new connections.
        while time.monotonic() < end:
            with self._changed:
                if self._end is not None or self._seat is not seat:
                    return
                self._interrupting += 1  # no other attempt begins, whose connections these would be
            try:
                self._interrupt(seat)  # not under the lock, which `outcome` needs: it may take long
            finally:
                with self._changed:
                    self._interrupting -= 1
                    self._changed.notify_all()
            thread.join(_CUT_EVERY_S)

    def end_process(self, pid: int) -> None:
        """Kills another process of this run on this node; a frozen one does not react to Ray."""
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if " ".join(process.cmdline()).startswith(f"ray::raypp/{self._run}/"):
                process.kill()

    def stacks(self) -> str:
        """Returns the stacks of this process' threads, the rank's first."""
        return process_evidence.own_stacks(None if self._thread is None else self._thread.ident)

    def flight_record(self) -> str:
        """Returns torch's record of this process' collectives as JSON; "" if there is none."""
        if self._rank_function is not None:
            return ""
        from raypp.rank.rank import flight_record

        return flight_record()

    def test_group(self, *arguments: Any) -> dict[str, Any]:
        """Runs ranks of a test group on this node, as `run_group` says."""
        return run_group(*arguments)

    def stacks_of(self, pid: int, log: str) -> str:
        """Returns those of another process of this run on this node, which does not answer."""
        return process_evidence.stacks_of(pid, log, self._run)

    def death_evidence(self, pid: int, log: str, oom_kills_before: int) -> DeathEvidence:
        """Returns the evidence that a dead process of this run on this node left."""
        return process_evidence.death_evidence(pid, log, oom_kills_before)

    # The rank -------------------------------------------------------------------------------------

    def _run_seat(self, decision: dict[str, Any], seat: Seat) -> None:
        try:
            end = self._live(decision, seat)
        except BaseException as error:  # noqa: BLE001  without an end, the run would wait for ever
            say_exception()
            end = RankEnd(unreported_end(error, seat), False, "its end could not be told")
        with self._changed:
            self._end = end
            self._changed.notify_all()

    def _live(self, decision: dict[str, Any], seat: Seat) -> RankEnd:
        before = set(threading.enumerate())
        set_seat_environment(seat)
        self._reporter = reporter = ControllerReporter(self._controller, seat, self._tails, self._orphan_watch.answered)
        with process_title(f"ray::raypp/{self._run}/{seat.label}"), reporter:
            result = self._result(decision, seat, reporter)
        self._free()
        reusable, why = self._reusable(result, before)
        return RankEnd(result, reusable, why, reporter.unwritten())

    def _free(self) -> None:
        """Frees what an exception kept alive: groups, stores, tensors, and the device's memory."""
        gc.collect()
        if self._rank_function is None:
            with contextlib.suppress(ImportError):  # then the rank did not begin, either
                from raypp.rank.rank import free_cache

                free_cache()

    def _result(self, decision: dict[str, Any], seat: Seat, reporter: ControllerReporter) -> RankResult | RankFailure:
        """Runs the rank; turns any exception into a failure for the controller."""
        try:
            rank = self._load_rank()  # takes seconds in a new process, and cannot be interrupted
            if self._leaving == seat.attempt:
                raise ConnectionAbortedError("the attempt ended before this rank began")
            reporter.phase("started")
            return rank(Decision.read(decision), seat, reporter)
        except BaseException as error:  # noqa: BLE001
            failure = failure_of(error, seat, reporter.last_step)
            if self._leaving == seat.attempt:
                cause = "left the attempt, as requested"
                return dataclasses.replace(failure, kind=FailureKind.LOST_PEER, cause=cause)
            say_exception()
            return failure

    def _reusable(self, result: RankResult | RankFailure, before: set[threading.Thread]) -> tuple[bool, str]:
        """Returns whether nothing of this seat is left that could disturb the next, and why not."""
        if isinstance(result, RankFailure) and not result.kind.traits.keeps_process:
            return False, f"the rank failed ({result.kind})"
        left = [
            thread.name
            for thread in threading.enumerate()
            if thread not in before
            and thread.name.startswith(_OWN_THREADS)
            and not thread.name.startswith(_LASTING_THREADS)
        ]
        return not left, f"threads of its last seat are still running: {', '.join(left)}" if left else ""

    def _is_in(self, attempt: int) -> bool:
        return self._seat is not None and self._seat.attempt == attempt

    def _interrupt(self, seat: Seat) -> None:
        if self._rank_function is not None:
            leave = getattr(importlib.import_module(self._rank_function.partition(":")[0]), "leave", None)
            if leave is not None:
                leave(seat)
            return
        from raypp.rank.rank import cut_connections

        cut_connections(seat.master_port)

    def _import_early(self) -> None:
        with contextlib.suppress(Exception):  # the first seat meets the same error and reports it
            self._load_rank()

    def _load_rank(self) -> RankFunction:
        if self._rank_function is not None:
            module, _, name = self._rank_function.partition(":")
            function: RankFunction = getattr(importlib.import_module(module), name)
            return function
        check_node(f"node {socket.gethostname()}")
        from raypp.rank.rank import run_rank

        return run_rank

    # Preemption and loss of the controller --------------------------------------------------------

    def _report_preemption(self) -> bool:
        """Reports SIGTERM if a rank is running; the controller then asks for a last checkpoint."""
        reporter, seat = self._reporter, self._seat
        if reporter is None or seat is None or self._end is not None:
            return False
        message = f"{seat.label} (rank {seat.rank}) on {seat.node} received SIGTERM: saving a checkpoint before it ends"
        reporter.event(seat.event("preemption_notice", message))
        return True

    def _exit_as_orphan(self) -> None:
        """Saves a last checkpoint, removes the run's placement groups, and exits."""
        say("no controller for too long: saving, then exiting")
        with self._changed:
            busy = self._seat is not None and self._end is None
            if busy and self._reporter is not None:
                self._reporter.request_stop()
                self._changed.wait_for(lambda: self._end is not None, _LAST_SAVE_S)
        # Removing the groups kills workers that still save: an idle one gives others time first.
        end = time.monotonic() + (_OTHERS_LAST_SAVE_S if busy else _LAST_SAVE_S + 2 * _OTHERS_LAST_SAVE_S)
        with contextlib.suppress(Exception):
            while time.monotonic() < end and holds_devices(self._cluster_name):
                time.sleep(0.5)
            remove_groups_of(self._cluster_name)
        os._exit(0)


def failure_of(error: BaseException, seat: Seat, step: int) -> RankFailure:
    """Returns the failure record of a rank that an exception ended."""
    try:
        kind, cause = kind_and_cause(error)
    except Exception as second:  # noqa: BLE001  a user's exception may fail to say what it is
        name, reason = type(error).__name__, type(second).__name__
        kind, cause = FailureKind.RAISED, f"{name}, whose message cannot be read ({reason})"
    return RankFailure(
        rank=seat.rank,
        label=seat.label,
        node=seat.node,
        pid=os.getpid(),
        kind=kind,
        cause=scrubbed(cause.strip()[:_LONGEST_CAUSE]),
        step=step,
        details=scrubbed(_shortened("".join(traceback.format_exception(error)))),
    )


def unreported_end(error: BaseException, seat: Seat) -> RankFailure:
    """Returns the failure of a rank that could not tell how it ended, because of this exception."""
    cause = f"{type(error).__name__} kept the rank from telling how it ended; see its log"
    return RankFailure(seat.rank, seat.label, seat.node, os.getpid(), FailureKind.UNKNOWN, cause)


def kind_and_cause(error: BaseException) -> tuple[FailureKind, str]:
    """Returns an exception's kind of failure, declared as `RayppError.failure_kind`, and the cause
    as text. If that is a symptom, or it declares none, the exceptions that caused it count, too."""
    declared = error.failure_kind if isinstance(error, RayppError) else None
    text = origin_in_words(error)
    if declared is not None and not declared.traits.symptom:
        return declared, text
    for inner in causes(error):
        if isinstance(inner, OSError) and inner.errno in _FULL:
            return FailureKind.DISK_FULL, f"{inner.filename or 'a file system'} is full: {text}"
    if declared is not None and declared.traits.permanent:
        return declared, text
    for inner in causes(error):
        if isinstance(inner, MemoryError) or any(sign in str(inner) for sign in _NO_HOST_MEMORY):
            return FailureKind.OUT_OF_MEMORY, f"the host is out of memory: {text}"
    if declared is not None:
        return declared, f"{declared.traits.words}: {text}" if declared is FailureKind.STORE_DOWN else text
    return FailureKind.RAISED, text


def _shortened(details: str) -> str:
    """Cuts a traceback in the middle: the root of the causes comes first, the last error last."""
    half = _LONGEST_DETAILS // 2
    return details if len(details) <= _LONGEST_DETAILS else f"{details[:half]}\n…\n{details[-half:]}"


def ask_interval_s(ranks: int) -> float:
    """Returns the seconds between two checks of one process, so that all processes of a run
    together cost the controller the same whatever their number."""
    return max(_INTERVAL_S, _INTERVAL_S_PER_RANK * ranks)


def exit_if_ended() -> None:
    """Ends this process if Ray no longer has its actor. Ray 2.60 does not end the process of an
    actor that was being created when the head restarted (github.com/ray-project/ray/issues/63763):
    Ray considers it dead, but it would keep its memory and device."""
    name = ray.get_runtime_context().get_actor_name() if ray.is_initialized() else None
    if not name:
        return
    try:
        ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        # Ray raises this after most errors of the head, too. The list is its answer, or raises.
        if {"name": name, "namespace": NAMESPACE} in ray.util.list_named_actors(all_namespaces=True):
            return
        say("Ray no longer has this actor: its process exits")
        os._exit(0)


class OrphanWatch:
    """Checks from a thread whether this actor still exists and the run's controller answers.
    `timeout_s`: silence after which the process is an orphan. `on_orphaned`: called once, in this
    object's thread. `interval_s`: seconds between two checks, at most a quarter of `timeout_s`."""

    def __init__(self, controller: Any, timeout_s: float, on_orphaned: Callable[[], None], interval_s: float) -> None:
        self._controller = controller
        self._timeout_s = timeout_s
        self._on_orphaned = on_orphaned
        self._interval_s = min(interval_s, timeout_s / 4)
        self._answered = time.monotonic()
        threading.Thread(target=self._watch, name="orphan-watch", daemon=True).start()

    def answered(self, at: float) -> None:
        """Records when (`time.monotonic`) the controller was heard from, which saves a check."""
        self._answered = max(self._answered, at)

    def _watch(self) -> None:
        while True:
            time.sleep(self._interval_s)
            with contextlib.suppress(Exception):  # Ray may not answer
                exit_if_ended()
            now = time.monotonic()
            if now - self._answered < self._interval_s:
                continue
            try:
                ray.get(self._controller.alive.remote(), timeout=_ANSWER_S)
            except Exception:  # noqa: BLE001  restarting, or gone for good: only time shows which
                if time.monotonic() - self._answered > self._timeout_s:
                    self._on_orphaned()
                    return
                continue
            self._answered = time.monotonic()
