"""A directory as a store: one file per object, written to a temporary file and then renamed."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import secrets
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote, unquote, urlsplit

from raypp.errors import JobError, Problem
from raypp.kinds import StoreKind
from raypp.storage.store import (
    MOST_LISTED,
    MOST_WHOLE_BYTES,
    AccessRefused,
    AlreadyExists,
    Data,
    ForeignNames,
    NotFound,
    ObjectInfo,
    Patience,
    StoreError,
    Unfinished,
    check_key,
    check_prefix,
    probe_by_writing,
    problem_of_key,
    too_large,
)
from raypp.untrusted.files import check_own, expand_home, kind_of
from raypp.untrusted.text import visible

KIND = StoreKind("file", "a directory every rank can reach", position=1, form="a directory", local=True)

_MOST_LINKS = 1000
_TEMPORARY = ".raypp-incoming"
"""The beginning of the names of folders of temporary files; each user has one."""
_STALE_AFTER_S = 24 * 3600.0
_DELETERS_S = 30.0
"""Seconds for which a writer retries while others delete the last objects of its folder."""
_LONGEST_PAUSE_S = 0.01
_LONGEST_NAME = 200
_STALE_TRIES = 3
_NOT_OWN = "let its owner delete it, or use another checkpoint.url"
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)


def open_url(url: str, *, missing_bucket: str = "error", patience: Patience | None = None) -> DirectoryStore:
    """Opens the store of `file:///directory` or a plain path; the first write creates it."""
    path = url
    if url.lower().startswith("file:"):
        parts = urlsplit(url)
        if parts.netloc not in ("", "localhost"):
            fault = f"{url!r} names the host {parts.netloc!r}"
            raise JobError(Problem("checkpoint.url", fault, f"use file:///{parts.netloc}{parts.path}"))
        path = unquote(parts.path)
    return DirectoryStore(expand_home(path).absolute())


class DirectoryStore:
    """Stores objects as files under `root`. Several hosts may share it over a network file system
    with atomic `rename` and `link` (NFS has them), and so may several users. A write goes to a
    temporary file in the user's folder in the root, is synced, and is then moved to its name. The
    temporary files of a killed writer are `unfinished`, for the same user. `root`: an absolute
    path; created by the first write."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.public = False
        """Files and folders get the modes that the umask leaves. Else only their owner may read
        them."""
        self._links: bool | None = None

    @property
    def url(self) -> str:
        return str(self.root)

    def put(self, key: str, data: Data, *, if_absent: bool = False) -> None:
        self._write(key, [data], len(data), if_absent)

    def put_stream(self, key: str, chunks: Iterable[Data], size: int) -> None:
        self._write(key, chunks, size, if_absent=False)

    def get(self, key: str, start: int | None = None, end: int | None = None) -> bytes:
        path = self._path(key)
        first = start or 0
        for left in reversed(range(_STALE_TRIES)):
            try:
                with self._opened(path, key) as file:
                    size = os.fstat(file.fileno()).st_size
                    most = size - first if end is None else min(end, size) - first
                    if end is None and most > MOST_WHOLE_BYTES:
                        raise too_large(f"{self.url}/{key}", most)
                    if most <= 0:
                        return b""
                    file.seek(first)
                    return file.read(most)
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                raise NotFound(Problem(f"{self.url}/{key}", "there is no such object")) from None
            except OSError as error:
                # Another host replaced the file while NFS had cached the old one: open it again.
                if error.errno != errno.ESTALE or not left:
                    raise self._failure(error, key) from error
        raise AssertionError("unreachable")

    def head(self, key: str) -> ObjectInfo | None:
        try:
            status = self._path(key).stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise self._failure(error, key) from error
        if stat.S_ISDIR(status.st_mode):
            return None
        if not stat.S_ISREG(status.st_mode):
            raise self._no_file(status.st_mode, key)
        return ObjectInfo(key, status.st_size, status.st_mtime)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        try:
            yield from _walk(self.root, check_prefix(prefix), without=_TEMPORARY)
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise self._failure(error, prefix.rpartition("/")[0]) from error

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            path = self._path_to_change(key)
            try:
                path.unlink()
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                raise self._failure(error, key) from error
            # As on S3, a folder exists only while it contains something.
            for parent in path.parents:
                if parent == self.root:
                    break
                try:
                    parent.rmdir()
                except OSError:
                    break

    def unfinished(self, prefix: str = "") -> Iterator[Unfinished]:
        wanted = _quoted(check_prefix(prefix))
        folder = self._temporary()
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise self._failure(error, folder.name) from error
        for entry in entries:
            name = entry.name.rpartition("~")[0]
            key = unquote(name)
            if name.startswith(wanted) and not problem_of_key(key) and not problem_of_key(entry.name):
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode):
                        yield Unfinished(key, f"{folder.name}/{entry.name}", status.st_mtime)

    def discard(self, unfinished: Iterable[Unfinished]) -> None:
        for one in unfinished:
            folder, _, name = check_key(one.id).partition("/")
            try:
                if self.root / folder == self._temporary():
                    (self.root / folder / name.replace("/", "")).unlink(missing_ok=True)
            except OSError as error:
                raise self._failure(error, one.key) from error

    def limitations(self) -> tuple[Problem, ...]:
        if self._links is None:
            self._links = self._try_to_link()
        if self._links:
            return ()
        return (
            Problem(
                self.url,
                "this file system has no hard links, so raypp creates claims and commits by exclusive creation: "
                "still only one writer wins, but a writer that is killed meanwhile leaves a torn object behind, "
                "which readers ignore",
                "use a file system with hard links (any local one, NFS), or S3",
            ),
        )

    def probe(self) -> None:
        with contextlib.suppress(OSError):  # a quick check; the write below finds the rest
            if not stat.S_ISDIR(self.root.stat().st_mode):
                raise StoreError(Problem("checkpoint.url", f"{self.root} is a file", "use a directory"))
        probe_by_writing(self)
        self._remove_stale()

    def _path(self, key: str) -> Path:
        return self.root / check_key(key)

    def _path_to_change(self, key: str) -> Path:
        path = self._path(key)
        run = self.root / key.partition("/")[0]
        if path.parent not in (self.root, run):
            folder = os.path.realpath(path.parent)
            if not Path(folder).is_relative_to(os.path.realpath(run)):
                fault = f"lies outside of {run}: a link leads to {visible(folder)}, where raypp changes nothing"
                raise StoreError(Problem(f"{self.url}/{key}", fault, "replace the link by a folder"))
        return path

    def _temporary(self) -> Path:
        """Returns this user's folder of temporary files, into which other users cannot look."""
        path = self.root / f"{_TEMPORARY}-{os.geteuid()}"
        if path.is_symlink():
            raise StoreError(Problem(str(path), "is a link; raypp keeps temporary files there", "delete the link"))
        return path

    def _opened(self, path: Path, key: str) -> BinaryIO:
        """Opens a regular file; never waits, as opening a FIFO would."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            if error.errno != errno.ENXIO:  # a socket
                raise
            raise self._no_file(path.stat().st_mode, key) from None
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISREG(mode):
            return os.fdopen(descriptor, "rb")
        os.close(descriptor)
        raise IsADirectoryError(errno.EISDIR, "is a folder") if stat.S_ISDIR(mode) else self._no_file(mode, key)

    def _no_file(self, mode: int, key: str) -> StoreError:
        return StoreError(Problem(f"{self.url}/{key}", f"is {kind_of(mode)}", "objects are regular files: delete it"))

    def _incoming(self, key: str) -> Path:
        """Returns a new temporary name; it contains the key, truncated if that is long."""
        # A folder in the root: all hosts see it, and a rename stays within one file system.
        return self._temporary() / f"{_quoted(key)[:_LONGEST_NAME]}~{secrets.token_hex(8)}"

    def _write(self, key: str, chunks: Iterable[Data], size: int, if_absent: bool) -> None:
        """Writes, syncs and renames a temporary file, so that readers see no torn object."""
        path = self._path_to_change(key)
        incoming = self._incoming(key)
        try:
            with os.fdopen(_create(incoming, 0o666 if self.public else 0o600), "wb") as file:
                # On NFS, files of this process may belong to another user.
                check_own(incoming.parent, StoreError, _NOT_OWN, os.fstat(file.fileno()).st_uid, 0o022)
                for chunk in chunks:
                    file.write(chunk)
                file.flush()
                written = file.tell()
                if written != size:
                    raise ValueError(f"{key}: the chunks have {written} bytes, but {size} were announced")
                os.fsync(file.fileno())
            self._move(incoming, path, if_absent, None if self.public else self.root / key.partition("/")[0])
        except FileExistsError:
            raise AlreadyExists(Problem(f"{self.url}/{key}", "already exists")) from None
        except OSError as error:
            raise self._failure(error, key) from error
        finally:
            with contextlib.suppress(OSError):
                incoming.unlink(missing_ok=True)

    def _move(self, incoming: Path, path: Path, if_absent: bool, run: Path | None) -> None:
        """`link` refuses to replace, `rename` replaces; both are atomic."""
        place: Callable[[Path, Path], object] = _link if if_absent else os.replace
        mode = 0o777 if self.public else 0o700
        give_up_at = time.monotonic() + _DELETERS_S
        new: set[Path] = set()
        while True:
            try:
                # Nothing slow between the two: until the file is there, a concurrent delete of the
                # folder's last object may remove the folder.
                new |= _create_folders(path.parent, mode)
                if run is not None and run != path and os.access(path.parent, os.W_OK, effective_ids=True):
                    check_own(run, StoreError, _NOT_OWN, incoming.stat().st_uid, 0)
                place(incoming, path)
                break
            except FileNotFoundError:
                if not incoming.exists() or time.monotonic() > give_up_at:
                    raise
                time.sleep(random.uniform(0, _LONGEST_PAUSE_S))  # so that the two do not keep step
        for folder in {path.parent, *(one.parent for one in new)}:
            _sync_directory(folder)

    def _try_to_link(self) -> bool:
        """Returns whether this file system has hard links, by linking a temporary file."""
        one, other = self._incoming("links"), self._incoming("links")
        try:
            os.close(_create(one, 0o600))
            os.link(one, other)
            return True
        except OSError as error:
            if error.errno in _NO_LINKS:
                return False
            raise self._failure(error, one.name) from error
        finally:
            for path in (one, other):
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)

    def _remove_stale(self) -> None:
        """Removes temporary files that are over a day old by the file system's clock."""
        marker = self._incoming("clock")
        with contextlib.suppress(OSError):
            marker.touch(mode=0o600, exist_ok=False)
            try:
                oldest = marker.stat().st_mtime - _STALE_AFTER_S
            finally:
                marker.unlink(missing_ok=True)
            for path in self._temporary().iterdir():
                with contextlib.suppress(OSError):  # its writer may rename it at any time
                    if path.lstat().st_mtime < oldest:
                        path.unlink()

    def remove_temporary(self) -> None:
        """Removes this user's folder of temporary files, if nothing is being written."""
        with contextlib.suppress(StoreError, OSError):  # a link, which is the user's own
            self._temporary().rmdir()

    def _failure(self, error: OSError, key: str) -> StoreError:
        url = f"{self.url}/{key}"
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            refused = visible(str(_refused_at(error, self.root)))
            fix = f"let this user read and write {refused}"
            return AccessRefused(Problem(url, f"not allowed: {error.strerror}", fix))
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            fix = "free some space, lower checkpoint.keep, or use another directory"
            return StoreError(Problem(url, "the disk is full", fix))
        if error.errno in (errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY):
            fault = f"a file is where a folder is needed, or the reverse: {error}"
            return StoreError(Problem(url, fault, "use another checkpoint.url"))
        return StoreError(Problem(url, f"{error}", "check that this machine can reach the directory"))


def _quoted(key: str) -> str:
    """Encodes a key as one file name; keys with a common prefix get names with a common prefix."""
    return quote(key, safe="").replace("~", "%7E")


def _refused_at(error: OSError, root: Path) -> Path:
    """Returns the folder, or the file that cannot be read, which refused access."""
    name = error.filename2 or error.filename
    path = Path(os.fsdecode(name)) if isinstance(name, str | bytes | os.PathLike) else root
    for folder in (path, *path.parents):
        with contextlib.suppress(OSError):  # missing, or in a folder that may not be entered
            if stat.S_ISDIR(folder.stat().st_mode) or not os.access(folder, os.R_OK, effective_ids=True):
                return folder
    return root


def _create(incoming: Path, mode: int) -> int:
    """Creates a temporary file, and its folder; returns the open file."""
    give_up_at = time.monotonic() + _DELETERS_S
    while True:
        try:
            _make_folders(incoming.parent)
            return os.open(incoming, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        except FileNotFoundError:  # another process of this user has just removed the empty folder
            if time.monotonic() > give_up_at or not incoming.parent.parent.is_dir():
                raise
            time.sleep(random.uniform(0, _LONGEST_PAUSE_S))


def _link(incoming: Path, path: Path) -> None:
    """Links a finished file to its name, unless that is taken."""
    try:
        os.link(incoming, path)
    except FileExistsError:
        # NFS repeats a request whose response was lost, and finds its own link: two names.
        if incoming.stat().st_nlink != 2 or not path.samefile(incoming):
            raise
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        _create_exclusively(incoming, path)


def _create_exclusively(incoming: Path, path: Path) -> None:
    """Creates the file where there are no hard links. One of several writers wins; a reader may see
    an incomplete file."""
    data, mode = incoming.read_bytes(), stat.S_IMODE(incoming.stat().st_mode)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        try:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        except OSError:
            path.unlink(missing_ok=True)
            raise


def _make_folders(path: Path) -> None:
    """Creates a folder and its parents, and makes each new name durable in its parent."""
    for folder in _create_folders(path):
        _sync_directory(folder.parent)


def _create_folders(path: Path, mode: int = 0o700) -> set[Path]:
    """Creates a folder with a mode, and its parents. Returns those that did not exist."""
    new = set()
    for folder in (path, *path.parents):
        if folder.is_dir():
            break
        new.add(folder)
    for folder in sorted(new):
        try:
            folder.mkdir(mode=mode if folder == path else 0o777)
        except FileExistsError:
            # Looked at once: it may go and return at any time.
            if not stat.S_ISDIR(folder.stat().st_mode):
                raise NotADirectoryError(errno.ENOTDIR, "not a folder", str(folder)) from None
    return new


def _sync_directory(path: Path) -> None:
    """Makes the names in a directory durable, where the file system supports it."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _walk(root: Path, prefix: str, without: str) -> Iterator[ObjectInfo]:
    """Yields every regular file whose path begins with the prefix. Links are followed, but not in a
    circle. Looks into no folder that can hold no such file: it may be another user's. `root`: the
    store's folder. `without`: entries of the root whose names begin so are left out. Raises
    OSError: a folder cannot be read; StoreError: there are too many files, or links to folders."""
    foreign = ForeignNames(str(root))
    entries = links = 0

    def below(folder: str, status: os.stat_result, around: tuple[tuple[int, int], ...] = ()) -> Iterator[ObjectInfo]:
        nonlocal entries, links
        around = (*around, (status.st_dev, status.st_ino))
        with os.scandir(root / folder) as listing:
            names = [entry.name for entry in islice(listing, MOST_LISTED + 1)]
        if len(names) > MOST_LISTED:
            raise _too_many(root, folder, "files", MOST_LISTED)
        for name in sorted(names):
            key = f"{folder}/{name}" if folder else name
            if not key.startswith(prefix) or (not folder and name.startswith(without)):
                continue
            entries += 1
            if entries > MOST_LISTED:
                raise _too_many(root, folder, "files", MOST_LISTED)
            if problem := problem_of_key(key):
                foreign.pass_over(key, problem)
                continue
            try:
                status = (root / key).stat()
                if stat.S_ISREG(status.st_mode):
                    yield ObjectInfo(key, status.st_size, status.st_mtime)
                elif not stat.S_ISDIR(status.st_mode):
                    foreign.pass_over(key, f"is {kind_of(status.st_mode)}")
                elif (status.st_dev, status.st_ino) in around:
                    foreign.pass_over(key, "is a link to a folder around it")
                else:
                    links += (root / key).is_symlink()
                    if links > _MOST_LINKS:
                        raise _too_many(root, folder, "links to folders", _MOST_LINKS)
                    yield from below(key, status, around)
            except (FileNotFoundError, NotADirectoryError):
                continue  # deleted during the walk, or a link to nothing
            except OSError as error:
                if error.errno not in (errno.ELOOP, errno.ENAMETOOLONG):
                    raise
                foreign.pass_over(key, f"cannot be opened: {error.strerror}")

    first = prefix.rpartition("/")[0]
    yield from below(first, (root / first).stat())


def _too_many(root: Path, folder: str, content: str, most: int) -> StoreError:
    return StoreError(Problem(str(root / folder), f"holds more than {most:,} {content}", "use a folder of its own"))
