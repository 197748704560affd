"""Evidence about a process of a run, collected on its node: stacks while it lives, log and counters
after its death; and what killed it, by that and Ray's error."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePath
from types import FrameType

import psutil

from raypp.failure_kinds import FailureKind

MOST_CHARACTERS = 6000
"""Longest text of one process' stacks."""
_TAIL_BYTES = 64 * 1024
_DUMP_S = 1.0
_PY_SPY_S = 5.0
_ASK = signal.SIGUSR2
_COLLECTIVES = {
    "all_gather": "all_gather", "all_gather_into_tensor": "all_gather", "all_gather_single": "all_gather",
    "foreach_all_gather": "all_gather", "foreach_all_gather_copy_out": "all_gather",
    "reduce_scatter": "reduce_scatter", "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter", "foreach_reduce": "reduce_scatter",
    "all_reduce": "all_reduce", "all_to_all_single": "all_to_all", "all_to_all": "all_to_all",
    "broadcast": "broadcast", "barrier": "barrier", "send": "send", "recv": "receive", "gather": "gather",
    "init_process_group": "the rendezvous", "new_group": "the creation of a group",
}  # fmt: skip
_WHERE = (f"torch{os.sep}distributed", f"raypp{os.sep}parallel")


def prepare() -> None:
    """Makes this process write its stacks to standard error on a signal, even while native code
    holds the interpreter. Does nothing when standard error is not a file."""
    with contextlib.suppress(Exception):
        faulthandler.register(_ASK, file=sys.stderr, all_threads=True, chain=False)
        # Ray enables it only for the thread that crashes, which need not be the rank's.
        faulthandler.enable(file=sys.stderr, all_threads=True)


def log_path() -> str:
    """Returns the file that receives this process' standard error; "" when it is not a file."""
    path = Path("/proc/self/fd/2")
    with contextlib.suppress(OSError):
        target = path.readlink()
        return str(target) if target.is_file() else ""
    return ""


def oom_kills() -> int:
    """Returns the processes that the kernel killed for memory (in this container, else machine)."""
    for path in _counter_files():
        with contextlib.suppress(OSError):
            if (count := oom_kills_in(path.read_text())) is not None:
                return count
    return 0


def _counter_files() -> list[Path]:
    root, own = Path("/sys/fs/cgroup"), []
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                own.append(root / path.lstrip("/") / "memory.events")
            elif "memory" in controllers.split(","):
                own.append(root / "memory" / path.lstrip("/") / "memory.oom_control")
    return [*own, root / "memory.events", root / "memory" / "memory.oom_control", Path("/proc/vmstat")]


def death_evidence(pid: int, log: str, oom_kills_before: int) -> DeathEvidence:
    """Returns the evidence that a dead process of this node left. `log`: its `log_path`.
    `oom_kills_before`: the value of `oom_kills` when it took its seat."""
    return DeathEvidence(_tail(log, pid), max(0, oom_kills() - oom_kills_before))


def _tail(log: str, pid: int) -> str:
    # Ray names the file by the process id; no other file is read on request.
    if not log.endswith(f"-{pid}.err"):
        return ""
    try:
        with Path(log).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def host_answers(ip: str, port: int, patience_s: float = 0.5) -> bool | None:
    """Returns whether a host answers. True: the port accepts connections. None: the host refuses
    them, so it is up but the process has ended. False: no answer."""
    try:
        socket.create_connection((ip, port), timeout=patience_s).close()
    except ConnectionRefusedError:
        return None
    except OSError:
        return False
    return True


# Stacks -------------------------------------------------------------------------------------------


def inside(thread: int | None) -> str:
    """Returns the collective or message in which a thread waits, by its stack; "" when in none."""
    frame = sys._current_frames().get(thread) if thread is not None else None
    return collective_of(frame)


def collective_of(frame: FrameType | None) -> str:
    """Returns the same for a frame and its callers: the outermost, so a barrier, not its gather."""
    outermost = ""
    while frame is not None:
        name = _COLLECTIVES.get(frame.f_code.co_name)
        if name is not None and any(part in frame.f_code.co_filename for part in _WHERE):
            outermost = name
        frame = frame.f_back
    return outermost


def own_stacks(first: int | None) -> str:
    """Returns the stacks of this process' threads, the given one first; bounded."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sorted(sys._current_frames().items(), key=lambda item: (item[0] != first, names.get(item[0], "")))
    parts = []
    for ident, frame in frames:
        lines = [f"  {entry.filename}:{entry.lineno} {entry.name}" for entry in traceback.extract_stack(frame)]
        parts.append("\n".join([f"thread {names.get(ident, ident)} (most recent call last)", *lines[-25:]]))
    return "\n".join(parts)[:MOST_CHARACTERS]


def stacks_of(pid: int, log: str, run: str) -> str:
    """Returns the stacks of a process of this run on this node, or why there are none."""
    if not _is_of(pid, run):
        return "the process is gone"
    state = psutil.Process(pid).status()
    if state != psutil.STATUS_STOPPED:
        begin = Path(log).stat().st_size if log and Path(log).is_file() else -1
        with contextlib.suppress(OSError):
            os.kill(pid, _ASK)
        end = time.monotonic() + _DUMP_S
        while begin >= 0 and time.monotonic() < end:
            time.sleep(0.05)
            if Path(log).stat().st_size > begin:
                time.sleep(0.1)  # the rest of it
                with Path(log).open("rb") as file:
                    file.seek(begin)
                    return file.read(4 * MOST_CHARACTERS).decode(errors="replace")[:MOST_CHARACTERS]
    return f"process state: {state}\n{_by_py_spy(pid)}"[:MOST_CHARACTERS]


def _is_of(pid: int, run: str) -> bool:
    try:
        return " ".join(psutil.Process(pid).cmdline()).startswith(f"ray::raypp/{run}/")
    except psutil.Error:
        return False


def _by_py_spy(pid: int) -> str:
    places = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    program = shutil.which("py-spy", path=places)
    if program is None:
        return "no stack: it does not react to signals, and py-spy is not installed"
    try:
        dump = [program, "dump", "--nonblocking", "--pid", str(pid)]
        done = subprocess.run(dump, capture_output=True, text=True, timeout=_PY_SPY_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"no stack: py-spy: {error}"
    return done.stdout or f"no stack: py-spy: {done.stderr.strip()[-500:]}"


# The cause of death -------------------------------------------------------------------------------

# What faulthandler writes before a signal ends the process.
_FATAL = {
    "Segmentation fault": ("SIGSEGV", "it accessed invalid memory"),
    "Bus error": (
        "SIGBUS",
        "a memory-mapped file has no memory behind it, often because a file system such as /dev/shm is full",
    ),
    "Aborted": ("SIGABRT", "native code aborted; its message is in the rank's log"),
    "Floating point exception": ("SIGFPE", "native code divided by zero"),
    "Illegal instruction": ("SIGILL", "native code was built for another processor"),
}
_FATAL_LINE = re.compile(r"Fatal Python error: (" + "|".join(_FATAL) + ")")
_FRAME = re.compile(r'File "([^"]+)", line (\d+) in (\S+)')
_THREAD = re.compile(r"^(Current thread|Thread) 0x[0-9a-f]+.*$", re.MULTILINE)
# Where an idle thread waits: Ray's own loops, and blocking calls of the standard library.
_IDLE_FRAME = re.compile(r"/(site-packages|dist-packages)/ray/|/python\d[^/]*/(threading|selectors|queue|socket)\.py$")
_LONGEST_REPORT = 4000
_RAY_OOM = ("NODE_OUT_OF_MEMORY", "running low on memory", "OutOfMemoryError")
_EXIT_CODE = re.compile(r"exit code (\d+)", re.IGNORECASE)


def within_rank_frame(rank: Callable[[], None]) -> None:
    """Calls `rank` from this frame, which identifies the stack of a rank's thread. faulthandler's
    output names no threads, so every rank's thread begins here."""
    rank()


def _frame_of(function: Callable[..., object]) -> re.Pattern[str]:
    """Returns a pattern for faulthandler's line for a function, in whatever folder its code is."""
    code = function.__code__
    frame = f'File "[^"]*{re.escape(PurePath(code.co_filename).name)}", line \\d+ in {re.escape(code.co_name)}$'
    return re.compile(frame, re.MULTILINE)


_RANK_FRAME = _frame_of(within_rank_frame)


@dataclass(frozen=True)
class DeathEvidence:
    """What another process of the node found of a dead one. `log_tail`: the end of what the process
    wrote to its standard error. `oom_kills`: processes the kernel's out-of-memory killer ended (in
    this container, else on this machine) since the process took its seat."""

    log_tail: str = ""
    oom_kills: int = 0


@dataclass(frozen=True)
class Death:
    """How a process died, and the cause as text."""

    kind: FailureKind
    cause: str
    details: str = ""


def cause_of_death(pid: int, ray_error: str, evidence: DeathEvidence | None) -> Death:
    """Finds the cause of death. SIGKILL leaves no trace in the process. A process that ended
    without any trace was killed by it, or native code called `exit`. `ray_error`: the text of the
    error that Ray raised for the actor. `evidence`: None if no process of the node was left."""
    who = f"its process (pid {pid})"
    if any(sign in ray_error for sign in _RAY_OOM):
        return Death(FailureKind.OUT_OF_MEMORY, f"{who} was killed by Ray's memory monitor: its node was out of memory")
    log_tail = evidence.log_tail if evidence is not None else ""
    fatal = None
    for fatal in _FATAL_LINE.finditer(log_tail):  # noqa: B007 - the last one is the death
        pass
    if fatal is not None:
        name, meaning = _FATAL[fatal[1]]
        where, report = _place_of_crash(log_tail[fatal.start() :])
        return Death(FailureKind.SEGFAULT, f"{who} was ended by {name}{where}: {meaning}", report)
    if evidence is not None and evidence.oom_kills > 0:
        count = f"the kernel's count of out-of-memory kills grew by {evidence.oom_kills}"
        cause = f"{who} was killed (SIGKILL) by the kernel's out-of-memory killer: {count}"
        return Death(FailureKind.OUT_OF_MEMORY, cause)
    if "SIGTERM" in ray_error:
        return Death(FailureKind.KILLED, f"{who} was ended by SIGTERM")
    code = _EXIT_CODE.search(ray_error)
    if code is not None and int(code[1]):
        return Death(FailureKind.KILLED, f"{who} exited with code {code[1]}")
    doubt = "" if evidence is not None else " (no process of its node was left to find out more)"
    cause = f"{who} ended without a trace: killed by SIGKILL, or an exit in native code{doubt}"
    return Death(FailureKind.KILLED, cause)


def _place_of_crash(report: str) -> tuple[str, str]:
    """Returns where the thread that crashed was, as text, and the stacks that show it. A signal
    from outside hits the thread in which Ray waits, and native threads (autograd's) have no Python
    frame. In these cases it is the place of the rank's thread."""
    starts = [match.start() for match in _THREAD.finditer(report)]
    threads = [report[begin:end].strip() for begin, end in zip(starts, [*starts[1:], len(report)], strict=True)]
    heading = report[: starts[0]].strip() if starts else report
    crashed = [thread for thread in threads if thread.startswith("Current")]
    ranks = [thread for thread in threads if _RANK_FRAME.search(thread) and thread not in crashed]
    stacks = "\n\n".join([heading, *crashed, *ranks])[:_LONGEST_REPORT]
    for words, some in ((", in", crashed), (" while the rank was in", ranks)):
        for frame in _FRAME.finditer("\n".join(some)):
            if not _IDLE_FRAME.search(frame[1]):
                return f"{words} {frame[3]} ({frame[1]}:{frame[2]})", stacks
    return "", stacks


def oom_kills_in(text: str) -> int | None:
    """Returns the counter of `memory.events`, `memory.oom_control` or `/proc/vmstat`; else None."""
    counter = re.search(r"^oom_kill (\d+)$", text, re.MULTILINE)
    return int(counter[1]) if counter else None
