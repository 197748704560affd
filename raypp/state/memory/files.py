"""The files of the memory tier: names, control block, ownership, and removal.

A file in shared memory holds one snapshot of one rank: it outlives its process, not its node.

    control block | data of one or two objects | headers | the trainer's own JSON

The objects are those of a checkpoint (`checkpoint.tensor_file`): what the rank writes in a save,
and what it holds of what others write. `….writing` becomes `….step-17` when complete; the control
block (magic, length, CRC-32, JSON) is written last. Who reads or writes a file holds its flock.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import psutil
from annotated_types import Ge, Le, Len, Lt
from typing_extensions import TypedDict

from raypp.crc32 import crc32
from raypp.errors import CheckpointError
from raypp.job.job import Job
from raypp.own_process import OwnProcess
from raypp.records import AXES
from raypp.state.checkpoint.layout import attempt_key
from raypp.storage import NotFound, ObjectStore
from raypp.untrusted.documents import Bounds, Count, parse_as

DIRECTORY_VARIABLE = "RAYPP_MEMORY_DIR"
"""Environment variable for a directory other than /dev/shm, set by the operator of a node. Tests
use it to play several nodes on one machine."""
LIMIT_VARIABLE = "RAYPP_MEMORY_LIMIT_MB"
"""Environment variable for the most memory, in MB, that the files on a node may take, set by the
operator. Without it, the available memory is the limit."""
CONTROL_BYTES = 4096
LARGEST_TAIL = 128 << 20
LARGEST_DATA = 1 << 44
LARGEST_STEP = 10**12 - 1
"""As many digits as a file's name may have."""
_MAGIC = b"RAYPPMT1"
_PAGE = 4096
_FORGET_S = 3600.0
"""A file without a lock holder is kept this long while the process that would start its successor
(the raylet, the torchrun agent) lives: the run may be between two attempts."""
_KEPT_S = 10 * 365 * 86400.0
_YOUNG_S = 60.0
_Crc = Annotated[int, Ge(0), Lt(1 << 32)]
_Name = Annotated[str, Len(0, 128)]
_Figure = Annotated[float, Ge(0), Lt(1e12)]
_LOOKS = 5
_READERS_S = 5.0
_NAME = re.compile(
    r"raypp\.(?P<run>[a-z0-9][a-z0-9-]{0,39})\.(?P<life>[0-9a-f]{12})\.attempt-(?P<attempt>[0-9]{1,9})"
    r"\.rank-(?P<rank>[0-9]{1,7})\.(?P<kind>own|copy)-(?P<number>[0-9])\.(?:step-(?P<step>[0-9]{1,12})|writing)"
)


@dataclass(frozen=True)
class SlotName:
    """The parts of a file's name. `life`: 12 hex digits that distinguish runs of the same name in
    different stores, or started over. `kind`: "own" if that rank wrote it, "copy" if its partner on
    another node did. `number`: index among the files that one process fills in turn. `step`: number
    of completed optimizer steps; None while the file is being written."""

    run: str
    life: str
    attempt: int
    rank: int
    kind: str
    number: int
    step: int | None = None

    def file_name(self) -> str:
        state = "writing" if self.step is None else f"step-{self.step}"
        return f"raypp.{self.run}.{self.life}.attempt-{self.attempt}.rank-{self.rank}.{self.kind}-{self.number}.{state}"


def parse_name(text: str) -> SlotName | None:
    """Parses the name of a memory tier file; None for any other file."""
    match = _NAME.fullmatch(text)
    if match is None:
        return None
    step = match["step"]
    return SlotName(
        match["run"], match["life"], int(match["attempt"]), int(match["rank"]), match["kind"], int(match["number"]),
        None if step is None else int(step),
    )  # fmt: skip


def memory_directory() -> Path:
    """Returns the directory in which this node keeps the files."""
    return Path(os.environ.get(DIRECTORY_VARIABLE) or "/dev/shm")


def list_slots(directory: Path) -> Iterator[tuple[SlotName, Path]]:
    """Yields the memory tier files that belong to this user, of all runs."""
    try:
        entries = sorted(directory.iterdir())
    except OSError:
        return
    for path in entries:
        name = parse_name(path.name)
        if name is None:
            continue
        with contextlib.suppress(OSError):
            facts = path.lstat()
            # Somebody else's file in a directory open to all is neither read nor removed.
            if stat.S_ISREG(facts.st_mode) and facts.st_uid == os.geteuid():
                yield name, path


def open_locked(path: Path, *, create: bool = False) -> int | None:
    """Opens a file and takes its lock; None if it is gone, or if a living process holds it.
    `create`: creates it, for its owner only. Raises OSError: it exists, or cannot be created."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    if create:
        flags |= os.O_CREAT | os.O_EXCL
    try:
        descriptor = os.open(path, flags, 0o600)
    except FileNotFoundError:
        return None
    except OSError:
        if create:
            raise
        return None
    if _lock(descriptor) and _same_file(descriptor, path):
        return descriptor
    os.close(descriptor)
    return None


def close_unlocked(descriptor: int) -> None:
    """Closes a file and releases its lock now: a mapping's own descriptor would keep the lock."""
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


@contextlib.contextmanager
def open_shared(path: Path) -> Iterator[int]:
    """Opens a file beside readers. Raises OSError; BlockingIOError: a living process writes it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield descriptor
    finally:
        close_unlocked(descriptor)


def peek(path: Path) -> dict[str, Any] | None:
    """Reads the control block of a file that no living process writes; None for any other."""
    with contextlib.suppress(OSError), open_shared(path) as descriptor:
        return read_control(descriptor)
    return None


def write_control(descriptor: int, about: Mapping[str, Any]) -> None:
    """Writes the control block; readers then trust the file if `about["complete"]` is true."""
    text = json.dumps(about, separators=(",", ":")).encode()
    block = _MAGIC + len(text).to_bytes(4, "little") + crc32(text).to_bytes(4, "little") + text
    if len(block) > CONTROL_BYTES:
        raise ValueError(f"the control block would take {len(block)} bytes, more than {CONTROL_BYTES}")
    os.pwrite(descriptor, block, 0)


class Control(TypedDict, total=False):
    """The keys of a control block. That of a complete snapshot has all of them. `objects` are first
    byte in the data, bytes of data, and bytes of header."""

    run: _Name
    life: _Name
    job: _Name
    layout: _Name
    mesh: Annotated[list[Annotated[int, Ge(1), Le(10**7)]], Len(len(AXES), len(AXES))]
    attempt: Annotated[int, Ge(0), Le(10**9)]
    rank: Annotated[int, Ge(0), Le(10**7)]
    step: Annotated[int, Ge(0), Le(LARGEST_STEP)]
    committed: Annotated[int, Ge(-1), Le(LARGEST_STEP)]
    keeper: Annotated[list[_Figure], Len(2, 2)]
    format: Count
    complete: bool
    objects: Annotated[list[tuple[Count, Count, Count]], Len(0, 2)]
    data_size: Annotated[int, Ge(0), Le(LARGEST_DATA)]
    data_crc: _Crc
    tail_size: Annotated[int, Ge(0), Le(LARGEST_TAIL)]
    tail_crc: _Crc


def decode_control(text: bytes) -> dict[str, Any]:
    """Decodes the JSON of a control block. Raises ValueError: it is not one."""
    try:
        bounds = Bounds(CONTROL_BYTES)
        return dict(parse_as(Control, text, "", bounds, kind="a control block", unknown="allow"))
    except CheckpointError as error:
        raise ValueError(error.problems[0].fault) from None


def read_control(descriptor: int) -> dict[str, Any] | None:
    """Reads the control block; None if it is missing or torn."""
    block = os.pread(descriptor, CONTROL_BYTES, 0)
    length, crc = int.from_bytes(block[8:12], "little"), int.from_bytes(block[12:16], "little")
    text = block[16 : 16 + length]
    if block[:8] != _MAGIC or len(text) != length or crc32(text) != crc:
        return None
    try:
        return decode_control(text)
    except ValueError:
        return None


def tail_offset(data_size: int) -> int:
    """Returns the offset of the tail in a file with `data_size` bytes of data."""
    return CONTROL_BYTES + -(-data_size // _PAGE) * _PAGE


def keeper() -> list[float]:
    """Returns pid and start time of the process that would start a successor: the raylet under Ray,
    else the parent. The parent of Ray's workers may be the fork server, which ends earlier."""
    raylet = os.environ.get("RAY_RAYLET_PID", "")
    pid = int(raylet) if raylet.isdigit() else os.getppid()
    try:
        process = OwnProcess.of(pid)
    except ProcessLookupError:
        return [pid, 0.0]
    return [process.pid, process.started]


def remove(path: Path) -> bool:
    """Removes a file unless a living process holds it; returns whether it is gone."""
    descriptor = open_locked(path)
    if descriptor is None:
        return not path.exists()
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    os.close(descriptor)
    return True


def life_of(store: ObjectStore, job: Job) -> str:
    """Returns 12 hex digits of the run's place and first attempt: others if it was started over."""
    try:
        first = store.get(attempt_key(job.name, 1))
    except NotFound:
        first = b""
    return hashlib.sha256(b"\0".join((job.run_url.encode(), first))).hexdigest()[:12]


def files_of(life: str, directory: Path | None = None) -> list[Path]:
    """Returns this node's files of a run, also those in use."""
    return [path for name, path in list_slots(directory or memory_directory()) if name.life == life]


def remove_run(life: str, directory: Path | None = None) -> list[str]:
    """Removes the files of a finished run that nobody uses; returns their names."""
    return [path.name for path in files_of(life, directory) if remove(path)]


def keep_run(life: str, directory: Path | None = None) -> None:
    """Keeps a run's files, which hold what could not be saved, until it is resumed or deleted: they
    count as changed far in the future."""
    for path in files_of(life, directory):
        with contextlib.suppress(OSError):
            os.utime(path, (time.time() + 2 * _KEPT_S,) * 2)


def remove_dead(directory: Path | None = None) -> list[str]:
    """Removes stale files and returns their names. A file is stale when no process holds it, and
    either the process that would start its writer's successor is gone, or the file has not changed
    for an hour. One of `keep_run` is not."""
    return [path.name for _, path in list_slots(directory or memory_directory()) if _is_dead(path) and remove(path)]


def room(directory: Path, run: str, life: str) -> int:
    """Returns how many bytes a run's files in the directory may take in all: the minimum of what
    file system, host and memory cgroup have left, and the operator's limit."""
    facts = os.statvfs(directory)
    free = [facts.f_bavail * facts.f_frsize, int(psutil.virtual_memory().available)]
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError, StopIteration):  # "max" when there is no limit
        left = int((group / "memory.max").read_text()) - int((group / "memory.current").read_text())
        counts = (group / "memory.stat").read_text().splitlines()
        # The kernel frees this part of the page cache by itself under memory pressure.
        left += next(int(line.split()[1]) for line in counts if line.startswith("inactive_file "))
        free.append(left)
    held_by_run = _allocated(directory, lambda name: (name.run, name.life) == (run, life))
    most = max(0, min(free)) + held_by_run
    limit = os.environ.get(LIMIT_VARIABLE)
    if limit:
        most = min(most, int(float(limit) * 1e6) - _allocated(directory, lambda name: True) + held_by_run)
    return max(0, most)


def _allocated(directory: Path, which: Callable[[SlotName], bool]) -> int:
    total = 0
    for name, path in list_slots(directory):
        if which(name):
            with contextlib.suppress(OSError):
                total += path.stat().st_blocks * 512
    return total


def _lock(descriptor: int) -> bool:
    """Takes the lock if possible; waits for processes that only read the control block."""
    end, looks = time.monotonic() + _READERS_S, 0
    while looks < _LOOKS and time.monotonic() < end:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        try:  # shared, it can be had beside readers, which end soon, but not beside an owner
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        except OSError:
            looks += 1
        time.sleep(0.005)
    return False


def _same_file(descriptor: int, path: Path) -> bool:
    """Checks that the path still names the open file: it may have been renamed meanwhile."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


def _is_dead(path: Path) -> bool:
    try:
        with open_shared(path) as descriptor:
            age = time.time() - os.fstat(descriptor).st_mtime
            about = read_control(descriptor)
    except OSError:
        return False  # it is gone, or a living process holds it
    if age < -_KEPT_S:
        return False
    if about is None:
        return age > _YOUNG_S  # its creator may be about to write the first block
    pid, started = about.get("keeper", (0, 0.0))
    return age > _FORGET_S or OwnProcess(int(pid), started).find() is None
