"""Stacks of this process, and the classification of exceptions."""

import errno
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raypp.control import process_evidence
from raypp.control.worker import failure_of, kind_and_cause
from raypp.errors import CheckpointError, DataError, JobError, RayppError, UnreachableError, origin_in_words
from raypp.failure_kinds import FailureKind
from raypp.rank.joining.device_memory import DeviceMemoryError
from raypp.rank.joining.lost_peer import LostPeerError
from raypp.rank.step.nonfinite import BrokenWeightsError, NonFiniteError
from raypp.records import Coordinates, Seat
from raypp.storage import StoreError


class StruckError(RayppError):
    """A new kind of error declares what it means."""

    failure_kind = FailureKind.CORRUPT


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (ValueError("no"), "raised", "ValueError: no"),
        (DataError("all wrong"), "user_error", "all wrong"),
        (LostPeerError("gone"), "lost_peer", "gone"),
        (NonFiniteError("step 3: the loss is nan"), "nonfinite", "the loss is nan"),
        (BrokenWeightsError("step 3"), "corrupt", "step 3"),
        (StruckError("by lightning"), "corrupt", "by lightning"),
        (DeviceMemoryError("out of device memory"), "device_out_of_memory", "device"),
        (MemoryError("big"), "out_of_memory", "host"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), "out_of_memory", "host"),
        (OSError(errno.ENOSPC, "No space left on device", "/mnt/x"), "disk_full", "/mnt/x is full"),
        (OSError(errno.EDQUOT, "Disk quota exceeded", "/mnt/y"), "disk_full", "/mnt/y is full"),
        (StoreError("503"), "store_down", "the store does not respond, or refuses requests: 503"),
        (CheckpointError("torn"), "raised", "torn"),
        (UnreachableError("no route"), "unreachable", "no route"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_each_exception_has_its_kind_of_failure(error: Exception, kind: str, words: str) -> None:
    actual, cause = kind_and_cause(error)
    assert actual == kind and words in cause


def test_a_symptom_has_the_kind_of_its_cause_and_an_error_of_the_job_stays_one() -> None:
    def after(error: Exception, cause: Exception) -> str:
        error.__cause__ = cause
        return kind_and_cause(error)[0]

    full, no_memory = OSError(errno.ENOSPC, "No space left on device"), MemoryError("big")
    assert [after(StoreError("no"), cause) for cause in (full, no_memory)] == ["disk_full", "out_of_memory"]
    assert [after(UnreachableError("no"), cause) for cause in (full, no_memory)] == ["disk_full", "out_of_memory"]
    assert [after(JobError("no"), cause) for cause in (full, no_memory)] == ["disk_full", "user_error"]
    assert after(LostPeerError("no"), full) == "lost_peer"


def test_an_error_in_the_users_own_code_names_its_line(tmp_path: Path) -> None:
    source = tmp_path / "my_model.py"
    source.write_text("def forward():\n    raise KeyError('layer')\n")
    space: dict[str, Any] = {}
    exec(compile(source.read_text(), str(source), "exec"), space)
    numbers = f"\n   [Stage 0] failed to run forward:\n   args: (Tensor({'0.1, ' * 9000})"

    def in_a_stage() -> None:
        try:
            space["forward"]()
        except Exception as error:
            raise RuntimeError(numbers) from error

    failure = failure_of(raised_by(in_a_stage), Seat("run", 1, 0, 1, Coordinates(), Coordinates(1, 1, 1, 1, 1)), 5)
    assert failure.cause.startswith(f"KeyError: 'layer' (at {source}:2 in forward: raise KeyError('layer'); ")
    assert failure.cause.endswith("then RuntimeError: [Stage 0] failed to run forward)")
    assert "KeyError: 'layer'" in failure.details and len(failure.details) < 9000


def test_the_root_of_causes_comes_first_and_the_users_own_errors_after_it(tmp_path: Path) -> None:
    source = tmp_path / "rows.py"
    source.write_text(
        "def stated():\n    try:\n        {}['k']\n    except KeyError as error:\n"
        "        raise ValueError('bad row 5') from error\n"
        "def handling():\n    try:\n        {}['k']\n    except KeyError:\n        raise ValueError('bad row 6')\n"
        "def grouped():\n    raise ExceptionGroup('two', [OSError('first'), OSError('second')])\n"
    )
    space: dict[str, Any] = {}
    exec(compile(source.read_text(), str(source), "exec"), space)
    stated = origin_in_words(raised_by(space["stated"]))
    assert stated == f"KeyError: 'k' (at {source}:3 in stated: {{}}['k']; then ValueError: bad row 5)"
    handling = origin_in_words(raised_by(space["handling"]))
    assert handling == f"ValueError: bad row 6 (at {source}:10 in handling: raise ValueError('bad row 6'))"
    assert origin_in_words(raised_by(space["grouped"])).startswith(f"OSError: first (at {source}:12 in grouped")


def raised_by(call: Callable[[], object]) -> BaseException:
    with pytest.raises(Exception) as raised:
        call()
    return raised.value


def test_the_stacks_of_this_process_begin_with_the_asked_thread_and_are_bounded() -> None:
    stop = threading.Event()

    def deep(depth: int) -> None:
        if depth:
            deep(depth - 1)
        else:
            stop.wait(30)

    thread = threading.Thread(target=deep, args=(100,), name="stuck")
    thread.start()
    try:
        text = process_evidence.own_stacks(thread.ident)
    finally:
        stop.set()
        thread.join()
    assert text.startswith("thread stuck") and "deep" in text and len(text) <= process_evidence.MOST_CHARACTERS


def test_only_the_log_of_the_process_in_question_is_read(tmp_path: Path) -> None:
    (tmp_path / "worker-ab-7.err").write_text("Fatal Python error: Bus error")
    assert "Bus error" in process_evidence.death_evidence(7, str(tmp_path / "worker-ab-7.err"), 0).log_tail
    assert process_evidence.death_evidence(8, str(tmp_path / "worker-ab-7.err"), 0).log_tail == ""
    assert process_evidence.death_evidence(7, "/etc/passwd", 0).log_tail == ""


def test_a_host_that_refuses_is_there_and_its_process_is_not() -> None:
    import socket

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        listening.listen()
        assert process_evidence.host_answers("127.0.0.1", port) is True
    assert process_evidence.host_answers("127.0.0.1", port) is None
