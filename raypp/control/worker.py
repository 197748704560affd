"""The actor that is one rank, in one seat after the other. The only place that reaches the runtime."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import psutil
import ray

from raypp.control import process_evidence
from raypp.control.classify import failure_of
from raypp.control.credentials import load_private_environment
from raypp.control.orphan import Lifeline
from raypp.control.placement import holds_devices, remove_groups_of
from raypp.control.protocol import Ending, Presence, Standing
from raypp.control.report.reporter import ControllerReporter, LogTail
from raypp.errors import UnreachableError
from raypp.failure_kinds import FailureKind
from raypp.ports import free_port
from raypp.records import Event, NodeFacts, RankFailure, RankResult, Reporter, Seat
from raypp.recovery.evidence import Remains, within_rank_frame
from raypp.spec.job import Job
from raypp.spec.secret import HIDDEN

RankFunction = Callable[[Job, Seat, Reporter], RankResult]

_CUT_EVERY_S = 0.05
_LAST_SAVE_S = 120.0
_OTHERS_LAST_SAVE_S = 5.0
_OWN_THREADS = "raypp-"
_LASTING_THREADS = "raypp-memory"
"""Threads of the runtime that may outlive a seat: they serve snapshots to whoever sits next."""


class Worker:
    """One process of a run. Ray calls its methods in threads of their own; the rank lives in another.

    It sits in one seat at a time, and between two attempts in none: what importing and connecting cost is paid once.
    Without a controller for `orphan_timeout_s` it saves, ends, and takes the run's placement groups with it.

    Args:
        run: The run's name.
        label: The coordinates planned for it, or `standby`.
        environment: The job's `resources.env`.
        controller: The run's controller, whichever life it is in.
        orphan_timeout_s: The job's `recovery.orphan_timeout_s`.
        rank_function: `module:function` in place of the real rank; the module's `leave(seat)`, when there is one,
            makes it come free.
        ask_every_s: Seconds between two questions to a controller of which nothing was heard.
    """

    def __init__(
        self,
        run: str,
        label: str,
        environment: dict[str, str],
        controller: Any,
        orphan_timeout_s: float,
        rank_function: str | None = None,
        ask_every_s: float = 5.0,
    ) -> None:
        self._run = run
        self._name = f"raypp/{run}/{label}"
        self._standby = label == "standby"
        self._controller = controller
        self._rank_function = rank_function
        self._changed = threading.Condition()
        self._seat: Seat | None = None
        self._bundle: int | None = None
        self._ending: Ending | None = None
        self._leaving = 0
        self._asked = 0
        self._relay: Any = None
        self._reporter: ControllerReporter | None = None
        self._thread: threading.Thread | None = None
        self._tails = (LogTail(1, "out"), LogTail(2, "err"))
        load_private_environment()
        os.environ.update({name: value for name, value in environment.items() if value != HIDDEN})
        process_evidence.prepare()
        self._hear_of_the_end()
        self._lifeline = Lifeline(
            self._find_controller, orphan_timeout_s, self._end_as_orphan, ask_every_s, self._last_answer
        )
        # Importing torch takes longer than all else that happens before the first seat is given out.
        threading.Thread(target=self._import_early, daemon=True).start()

    def __repr__(self) -> str:
        return self._name

    def _hear_of_the_end(self) -> None:
        """SIGTERM is how clouds and operators say that a machine goes: a rank saves, and then leaves."""
        try:
            before = signal.getsignal(signal.SIGTERM)

            def told(number: int, frame: FrameType | None) -> None:
                reporter, seat = self._reporter, self._seat
                if reporter is not None and seat is not None and self._ending is None:
                    words = f"{seat.label} (rank {seat.rank}) on {seat.node} was told to end (SIGTERM): saving first"
                    reporter.event(
                        Event("preemption_notice", words, attempt=seat.attempt, rank=seat.rank, node=seat.node)
                    )
                elif callable(before):
                    before(number, frame)
                else:
                    os._exit(128 + number)

            signal.signal(signal.SIGTERM, told)
        except ValueError:  # not in the main thread: Ray's own handling stays
            logging.getLogger("raypp").warning("rank processes end at once on SIGTERM here")

    # What the controller calls --------------------------------------------------------------------

    def where(self) -> Presence:
        """Where this process is, and a port of its node that is free now."""
        context = ray.get_runtime_context()
        ip = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        devices = context.get_accelerator_ids().get("GPU", [])
        facts = NodeFacts(
            node_id=context.get_node_id(),
            ip=ip,
            hostname=socket.gethostname(),
            pid=os.getpid(),
            interface=interface_of(ip),
            device_index=int(devices[0]) if devices else 0,
        )
        return Presence(facts, free_port(ip), process_evidence.log_path(), process_evidence.oom_kills())

    def standing(self) -> Standing:
        """Who this is and what it does, for a controller that finds it."""
        return Standing(self.where(), self._bundle, self._seat, self._ending is not None, self._standby)

    def begin(self, job: dict[str, Any], seat: Seat, bundle: int, relay: Any = None) -> None:
        """Takes a seat and lives a rank's life in it, in a thread of its own; `outcome` tells how that ends.

        Args:
            relay: Handle of the relay to report to; None: to the controller.

        Raises:
            RuntimeError: The life in the last seat is not over.
        """
        with self._changed:
            if self._seat is not None and self._ending is None:
                raise RuntimeError(f"still in attempt {self._seat.attempt}")
            self._seat, self._bundle, self._relay, self._ending = seat, bundle, relay, None
            self._thread = threading.Thread(
                target=within_rank_frame, args=(lambda: self._live(job, seat),), name="rank", daemon=True
            )
            self._thread.start()

    def outcome(self, attempt: int, patience_s: float = 30.0) -> Ending | None:
        """How the life in the seat of an attempt ended; None when it still goes on after `patience_s`.

        May be asked again, also by a later life of the controller; who asked before for this seat gets no answer then.
        """
        self._lifeline.heard(time.monotonic())
        with self._changed:
            asked = self._asked = self._asked + self._is_in(attempt)
            self._changed.notify_all()

            def over() -> bool:
                if not self._is_in(attempt):
                    return self._seat is not None and self._seat.attempt > attempt >= 0
                return self._ending is not None or self._asked != asked

            self._changed.wait_for(over, patience_s)
            return self._ending if self._is_in(attempt) else None

    def leave(self, attempt: int, patience_s: float = 10.0) -> None:
        """Makes the rank of that attempt end soon, whatever it waits for; `outcome` tells when it has."""
        seat, thread = self._seat, self._thread
        if seat is None or thread is None or seat.attempt < attempt:
            self._leaving = attempt  # Ray may hand this over before the seat itself
            return
        if seat.attempt != attempt:
            return
        self._leaving = attempt
        end = time.monotonic() + patience_s
        # Again and again: it may be about to make new connections.
        while time.monotonic() < end:
            with self._changed:  # never while another attempt begins, whose connections these would be
                if self._ending is not None or self._seat is not seat:
                    return
                self._free(seat)
            thread.join(_CUT_EVERY_S)

    def end_process(self, pid: int) -> None:
        """Ends another process of this run on this node: one that is frozen does not do it when Ray asks it to."""
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if " ".join(process.cmdline()).startswith(f"ray::raypp/{self._run}/"):
                process.kill()

    def stacks(self) -> str:
        """The stacks of this process' threads, the rank's first."""
        return process_evidence.own_stacks(None if self._thread is None else self._thread.ident)

    def stacks_of(self, pid: int, log: str) -> str:
        """Those of another process of this run on this node, which does not answer."""
        return process_evidence.stacks_of(pid, log, self._run)

    def remains_of(self, pid: int, log: str, oom_kills_before: int) -> Remains:
        """What a dead process of this run on this node left."""
        return process_evidence.remains_of(pid, log, oom_kills_before)

    # The rank's life ------------------------------------------------------------------------------

    def _live(self, job: dict[str, Any], seat: Seat) -> None:
        before = set(threading.enumerate())
        announce_seat(seat)
        self._reporter = reporter = ControllerReporter(self._controller, seat, self._tails, self._relay)
        with _title(f"ray::raypp/{self._run}/{seat.label}"), reporter:
            result = self._result(job, seat, reporter)
        gc.collect()  # groups, stores and tensors that an exception kept alive
        usable, why = self._usable(result, before)
        with self._changed:
            self._ending = Ending(result, usable, why, reporter.left_over())
            self._changed.notify_all()

    def _result(self, job: dict[str, Any], seat: Seat, reporter: ControllerReporter) -> RankResult | RankFailure:
        """Whatever happens, the controller must hear of it."""
        try:
            rank = self._load_rank()  # takes seconds in a new process, in which nothing makes it come free
            if self._leaving == seat.attempt:
                raise ConnectionAbortedError("the attempt ended before this rank began")
            reporter.phase("started")
            return rank(Job.model_validate(job), seat, reporter)
        except BaseException as error:  # noqa: BLE001
            failure = failure_of(error, seat, reporter.last_step)
            if self._leaving == seat.attempt:
                cause = "left the attempt, as it was asked to"
                return dataclasses.replace(failure, kind=FailureKind.LOST_PEER, cause=cause)
            traceback.print_exc()
            return failure

    def _usable(self, result: RankResult | RankFailure, before: set[threading.Thread]) -> tuple[bool, str]:
        """Whether nothing of this seat is left that could reach into the next one."""
        if isinstance(result, RankFailure) and not result.kind.traits.keeps_process:
            return False, f"it failed by itself ({result.kind})"
        left = [
            thread.name
            for thread in threading.enumerate()
            if thread not in before
            and thread.name.startswith(_OWN_THREADS)
            and not thread.name.startswith(_LASTING_THREADS)
        ]
        return not left, f"threads of its last seat are still at work: {', '.join(left)}" if left else ""

    def _is_in(self, attempt: int) -> bool:
        return self._seat is not None and self._seat.attempt == attempt

    def _free(self, seat: Seat) -> None:
        if self._rank_function is not None:
            free = getattr(importlib.import_module(self._rank_function.partition(":")[0]), "leave", None)
            if free is not None:
                free(seat)
            return
        from raypp.train.rank import cut_connections

        cut_connections(seat.master_port)

    def _import_early(self) -> None:
        with contextlib.suppress(Exception):  # the first seat meets the same error, and reports it
            self._load_rank()

    def _load_rank(self) -> RankFunction:
        if self._rank_function is not None:
            module, _, name = self._rank_function.partition(":")
            function: RankFunction = getattr(importlib.import_module(module), name)
            return function
        from raypp.train.rank import run_rank

        return run_rank

    # Without a controller -------------------------------------------------------------------------

    def _find_controller(self) -> None:
        ray.get(self._controller.alive.remote(), timeout=10)

    def _last_answer(self) -> float:
        return 0.0 if self._reporter is None else self._reporter.answered

    def _end_as_orphan(self) -> None:
        """Nobody leads the run any more: a last save, then nothing of it may be left."""
        print("no controller for too long: saving, then ending", file=sys.stderr)  # noqa: T201
        with self._changed:
            busy = self._seat is not None and self._ending is None
            if busy and self._reporter is not None:
                self._reporter.ask_to_stop()
                self._changed.wait_for(lambda: self._ending is not None, _LAST_SAVE_S)
        # Giving the groups back ends whoever still saves: one that was idle leaves that to the others, for long enough.
        end = time.monotonic() + (_OTHERS_LAST_SAVE_S if busy else _LAST_SAVE_S + 2 * _OTHERS_LAST_SAVE_S)
        with contextlib.suppress(Exception):
            while time.monotonic() < end and holds_devices(self._run):
                time.sleep(0.5)
            remove_groups_of(self._run)
        os._exit(0)


def announce_seat(seat: Seat) -> None:
    """Sets what torchrun would have set, starts logging to this process' log, and prints the seat."""
    environment = {
        "RANK": seat.rank,
        "WORLD_SIZE": seat.world_size,
        "LOCAL_RANK": seat.local_rank,
        "LOCAL_WORLD_SIZE": seat.local_world_size,
        "GROUP_RANK": seat.node_rank,
        "MASTER_ADDR": seat.master_addr,
        "MASTER_PORT": seat.master_port,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": 1,
    }
    os.environ.update({key: str(value) for key, value in environment.items()})
    logging.basicConfig(
        level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr, force=True
    )
    logging.getLogger("raypp").setLevel(logging.INFO)
    logging.getLogger("raypp").info(
        "rank %d of %d is %s on %s, pid %d, device %s:%d, %s threads, attempt %d",
        seat.rank, seat.world_size, seat.label, seat.node, os.getpid(), seat.device, seat.device_index,
        os.environ.get("OMP_NUM_THREADS"), seat.attempt,
    )  # fmt: skip


def interface_of(ip: str) -> str:
    """The network interface that carries an address of this node; for any loopback address the loopback's.

    Raises:
        UnreachableError: No interface has it.
    """
    found = psutil.net_if_addrs()
    for name, addresses in found.items():
        if any(address.address.partition("%")[0] == ip for address in addresses):
            return str(name)
    if ip.startswith("127."):
        for name, addresses in found.items():
            if any(address.address.startswith("127.") for address in addresses):
                return str(name)
    raise UnreachableError(f"no interface of {socket.gethostname()} has Ray's address {ip}: {sorted(found)}")


@contextlib.contextmanager
def _title(title: str) -> Iterator[None]:
    """Holds the process title. Ray sets its own around every method call; ours wins until the end."""
    module: Any = importlib.import_module("ray._raylet")
    set_title = module.setproctitle
    set_title(title)
    module.setproctitle = lambda _title: None
    try:
        yield
    finally:
        module.setproctitle = set_title
