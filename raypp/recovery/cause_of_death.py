"""What killed a process, from the traces a death leaves: Ray's words, its own last words, the kernel's counters."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePath

from raypp.failure_kinds import FailureKind

# What faulthandler writes before a signal ends the process.
_FATAL = {
    "Segmentation fault": ("SIGSEGV", "it touched memory that is not there"),
    "Bus error": ("SIGBUS", "memory behind a file is gone, often because a file system such as /dev/shm is full"),
    "Aborted": ("SIGABRT", "native code gave up; its own words are in the rank's log"),
    "Floating point exception": ("SIGFPE", "native code divided by zero"),
    "Illegal instruction": ("SIGILL", "native code built for another processor"),
}
_FATAL_LINE = re.compile(r"Fatal Python error: (" + "|".join(_FATAL) + ")")
_FRAME = re.compile(r'File "([^"]+)", line (\d+) in (\S+)')
_THREAD = re.compile(r"^(Current thread|Thread) 0x[0-9a-f]+.*$", re.MULTILINE)
# Where a thread waits that has nothing to do: Ray's own loops, and what the standard library waits in.
_IDLE_FRAME = re.compile(r"/(site-packages|dist-packages)/ray/|/python\d[^/]*/(threading|selectors|queue|socket)\.py$")
_LONGEST_REPORT = 4000
_RAY_OOM = ("NODE_OUT_OF_MEMORY", "running low on memory", "OutOfMemoryError")
_EXIT_CODE = re.compile(r"exit code (\d+)", re.IGNORECASE)


def within_rank_frame(life: Callable[[], None]) -> None:
    """Calls `life` in a frame of its own, by which the stack of a rank's thread is told from others.

    What faulthandler writes names no thread, so every rank's thread begins here.
    """
    life()


def _frame_of(function: Callable[..., object]) -> re.Pattern[str]:
    """How faulthandler writes a frame of a function: also from another node, where the code lies elsewhere."""
    code = function.__code__
    place = f'File "[^"]*{re.escape(PurePath(code.co_filename).name)}", line \\d+ in {re.escape(code.co_name)}$'
    return re.compile(place, re.MULTILINE)


_RANK_FRAME = _frame_of(within_rank_frame)


@dataclass(frozen=True)
class DeathEvidence:
    """What another process of the node found of a dead one.

    Attributes:
        words: The end of what the process wrote to its standard error.
        oom_kills: Processes the kernel's out-of-memory killer ended (in this container, else on this machine)
            since the process took its seat.
        memory_bytes: What the process had, when it was last looked at; 0 when nobody did.
    """

    log_tail: str = ""
    oom_kills: int = 0
    memory_bytes: int = 0


@dataclass(frozen=True)
class Death:
    """How a process died, and the cause in words."""

    kind: FailureKind
    cause: str
    details: str = ""


def cause_of_death(pid: int, ray_words: str, evidence: DeathEvidence | None) -> Death:
    """Reads the traces.

    SIGKILL leaves none in the process; so a process that ended without a word was ended by it, or by an exit below
    Python.

    Args:
        ray_words: The error that Ray raised for the actor.
        evidence: None: nobody could look.
    """
    who = f"its process (pid {pid})"
    if any(sign in ray_words for sign in _RAY_OOM):
        return Death(
            FailureKind.OUT_OF_MEMORY, f"{who} was ended by Ray's memory monitor: its node was short of memory"
        )
    words = evidence.log_tail if evidence is not None else ""
    fatal = None
    for fatal in _FATAL_LINE.finditer(words):  # noqa: B007 - the last one is the death
        pass
    if fatal is not None:
        signal, meaning = _FATAL[fatal[1]]
        where, report = _place_of_crash(words[fatal.start() :])
        return Death(FailureKind.SEGFAULT, f"{who} was ended by {signal}{where}: {meaning}", report)
    if evidence is not None and evidence.oom_kills > 0:
        had = f"; it had {evidence.memory_bytes / 2**30:.2f} GiB" if evidence.memory_bytes else ""
        count = f"the kernel's count of out-of-memory kills grew by {evidence.oom_kills}"
        return Death(FailureKind.OUT_OF_MEMORY, f"{who} was killed (SIGKILL) for want of memory: {count}{had}")
    if "SIGTERM" in ray_words:
        return Death(FailureKind.KILLED, f"{who} was ended by SIGTERM")
    code = _EXIT_CODE.search(ray_words)
    if code is not None and int(code[1]):
        return Death(FailureKind.KILLED, f"{who} exited by itself with code {code[1]}")
    doubt = "" if evidence is not None else " (no process of its node was left to look for more)"
    return Death(FailureKind.KILLED, f"{who} ended without a word: killed by SIGKILL, or an exit in native code{doubt}")


def _place_of_crash(report: str) -> tuple[str, str]:
    """Where a process was when it crashed, in words, and the stacks that tell it.

    The thread that crashed says it, unless it has no Python frame of its own: a signal from outside meets the thread in
    which Ray waits, and native threads (autograd's) have none. Then what the rank's own thread was in is told.

    Args:
        report: What faulthandler wrote: a heading, then one thread after the other, in any order.
    """
    starts = [found.start() for found in _THREAD.finditer(report)]
    threads = [report[begin:end].strip() for begin, end in zip(starts, [*starts[1:], len(report)], strict=True)]
    heading = report[: starts[0]].strip() if starts else report
    crashed = [thread for thread in threads if thread.startswith("Current")]
    ranks = [thread for thread in threads if _RANK_FRAME.search(thread) and thread not in crashed]
    told = "\n\n".join([heading, *crashed, *ranks])[:_LONGEST_REPORT]
    for words, some in ((", in", crashed), (" while the rank was in", ranks)):
        for frame in _FRAME.finditer("\n".join(some)):
            if not _IDLE_FRAME.search(frame[1]):
                return f"{words} {frame[3]} ({frame[1]}:{frame[2]})", told
    return "", told


def oom_kills_in(text: str) -> int | None:
    """The kernel's counter in the text of `memory.events`, `memory.oom_control` or `/proc/vmstat`; None: not there."""
    found = re.search(r"^oom_kill (\d+)$", text, re.MULTILINE)
    return int(found[1]) if found else None
