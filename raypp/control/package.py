"""Builds a run's package for Ray: raypp's code and the request; no secret, as nodes write it."""

import contextlib
import dataclasses
import hashlib
import importlib.util
import io
import json
import zipfile
from collections.abc import Sequence
from pathlib import Path

import raypp
from raypp.control.protocol import REQUEST_FILE, RunRequest

INFERENCE_FILE = "raypp-inference.json"
"""The request of `raypp.tools.inference.driver`."""
_ONLY_HERE = ("cli", "clusters", "doctor")
_UNCHECKED_HASH = (0b01).to_bytes(4, "little")
_EPOCH = (2020, 1, 1, 0, 0, 0)


def code_files(*, compiled: bool = False) -> list[tuple[str, bytes]]:
    """Returns every file of the running raypp, as (path in the package, content). `compiled`: also
    return the compiled form of those that a run's processes import, as far as Python has it here.
    Each run has a package of its own, whose processes would otherwise compile raypp each time."""
    root = Path(raypp.__file__).parent
    files = []
    for path in sorted(root.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts and path.suffix in (".py", ".typed", ".json", ".html"):
            relative, content = path.relative_to(root), path.read_bytes()
            name = f"raypp/{relative.as_posix()}"
            files.append((name, content))
            wanted = compiled and path.suffix == ".py" and relative.parts[0] not in _ONLY_HERE
            if wanted and (code := _compiled(path, content)) is not None:
                files.append((importlib.util.cache_from_source(name), code))
    return files


def _compiled(path: Path, source: bytes) -> bytes | None:
    """Returns the compiled form of a file; None if Python has none of this source. A Python of
    another version ignores it. None compares it with the source (PEP 552), so this does."""
    magic = importlib.util.MAGIC_NUMBER
    with contextlib.suppress(OSError):
        stat = path.stat()
        cached = Path(importlib.util.cache_from_source(str(path))).read_bytes()
        size_and_time = int(stat.st_mtime).to_bytes(4, "little") + (stat.st_size & 0xFFFFFFFF).to_bytes(4, "little")
        if cached[:16] == magic + bytes(4) + size_and_time:
            return magic + _UNCHECKED_HASH + importlib.util.source_hash(source) + cached[16:]
    return None


def build_package(request: RunRequest | None, own: Sequence[tuple[str, bytes]] = ()) -> tuple[str, bytes]:
    """Returns a zip that Ray unpacks as a job's working directory on every node.

    The same content gives the same bytes and the same name, so it is uploaded once. `request`: the
    run to start; None for a `cluster_call.Call`. `own`: files of the user's own kinds; their folder
    is in `sys.path` of all its processes. Returns the package's name, a content hash, and its
    bytes."""
    files = [*code_files(compiled=request is not None), *own]
    if request is not None:
        files.append((REQUEST_FILE, json.dumps(dataclasses.asdict(request), indent=1).encode()))
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in files:
            info = zipfile.ZipInfo(name, _EPOCH)
            info.external_attr = 0o600 << 16
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, data, compresslevel=1)
    content = buffer.getvalue()
    return f"_ray_pkg_{hashlib.sha256(content).hexdigest()[:32]}.zip", content
