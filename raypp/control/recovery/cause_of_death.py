"""Finds what killed a process, from Ray's error, the end of its log, and the kernel's counters."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePath

from raypp.failure_kinds import FailureKind

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
    """Returns a pattern for the line faulthandler writes for a function, in whatever folder a node
    has its code."""
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
    error that Ray raised for the actor. `evidence`: None when no other process of the node was left
    to collect it."""
    who = f"its process (pid {pid})"
    if any(sign in ray_error for sign in _RAY_OOM):
        return Death(FailureKind.OUT_OF_MEMORY, f"{who} was killed by Ray's memory monitor: its node was out of memory")
    log_tail = evidence.log_tail if evidence is not None else ""
    fatal = None
    for fatal in _FATAL_LINE.finditer(log_tail):  # noqa: B007 - the last one is the death
        pass
    if fatal is not None:
        signal, meaning = _FATAL[fatal[1]]
        where, report = _place_of_crash(log_tail[fatal.start() :])
        return Death(FailureKind.SEGFAULT, f"{who} was ended by {signal}{where}: {meaning}", report)
    if evidence is not None and evidence.oom_kills > 0:
        count = f"the kernel's count of out-of-memory kills grew by {evidence.oom_kills}"
        return Death(
            FailureKind.OUT_OF_MEMORY, f"{who} was killed (SIGKILL) by the kernel's out-of-memory killer: {count}"
        )
    if "SIGTERM" in ray_error:
        return Death(FailureKind.KILLED, f"{who} was ended by SIGTERM")
    code = _EXIT_CODE.search(ray_error)
    if code is not None and int(code[1]):
        return Death(FailureKind.KILLED, f"{who} exited with code {code[1]}")
    doubt = "" if evidence is not None else " (no process of its node was left to find out more)"
    return Death(
        FailureKind.KILLED, f"{who} ended without a trace: killed by SIGKILL, or an exit in native code{doubt}"
    )


def _place_of_crash(report: str) -> tuple[str, str]:
    """Returns where a process crashed, as text, and the stacks that show it. This is the place of
    the thread that crashed. A signal from outside hits the thread in which Ray waits, and native
    threads (autograd's) have no Python frame. In these cases it is the place of the rank's
    thread."""
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
    """Returns the kernel's counter from `memory.events`, `memory.oom_control` or `/proc/vmstat`;
    None without one."""
    counter = re.search(r"^oom_kill (\d+)$", text, re.MULTILINE)
    return int(counter[1]) if counter else None
