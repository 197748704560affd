"""What must be installed where: raypp's optional packages, and the versions that nodes need. A job
takes raypp's own code along, so nodes need only what that code imports."""

import importlib.util
import os
import platform
import re
import shutil
from importlib import metadata

from raypp.errors import JobError, Problem

OLDEST = {"python": "3.11", "ray": "2.50", "torch": "2.11"}
"""The oldest versions that raypp runs with, as pyproject.toml states them."""
ON_NODES = (
    "torch", "ray", "numpy", "pydantic", "PyYAML", "jinja2", "zstandard", "boto3", "safetensors", "tokenizers",
    "psutil",
)  # fmt: skip
"""The distributions that ranks and controllers import."""
# A process outlives the failure of a communicator and takes a seat in the next attempt, and raypp's
# own watch decides what hangs. With torch's defaults its threads end the process by SIGABRT.
NCCL_OF_TORCH = {
    # 2: abort the communicators after an error. 1: also end the process. 3, the default: only end
    # it. 0: do nothing, so that kernels wait for dead peers.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    # 0: do not end the process 8 minutes after the watchdog's last progress, or after another rank
    # asked for a dump.
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    # 0: do not end the process when the watchdog meets a CUDA error: the rank meets and reports it.
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    # No dump of recent collectives to /tmp after an error, and no wait (4 times this many ms) for
    # it before the communicators are aborted.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    # 1: the flight recorder knows what the device has started, not only what the host has queued.
    "TORCH_NCCL_ENABLE_TIMING": "1",
}
"""Variables of a rank's process, unless the user sets them."""


def need(module: str, extra: str, feature: str, node: str = "") -> None:
    """Checks that an optional package is installed in this process' Python. Does not import it.
    `extra`: the extra of raypp that installs it. `feature`: who needs it, for the error: "raypp
    parity". `node`: the node's name, if this is not the machine of the user. Raises JobError: it is
    not installed; names the extra."""
    if importlib.util.find_spec(module) is None:
        where = f"on node {node}" if node else "here"
        fix = f"pip install 'raypp[{extra}]'" + (" there, into the Python that runs Ray" if node else "")
        raise JobError(Problem(feature, f"needs {module}, which is not installed {where}", fix))


def c_compiler() -> str | None:
    """Returns this machine's C compiler, which Triton runs for every kernel; None without one."""
    names = [os.environ.get("CC"), "cc", "gcc", "clang"]
    return next((path for name in names if name and (path := shutil.which(name))), None)


def usable_cores() -> int:
    """Returns how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def is_older(version: str, oldest: str) -> bool:
    """Whether a version such as `2.9.1+cpu` is older than one such as `2.11`."""
    numbers = _numbers(version)
    return bool(numbers) and numbers < _numbers(oldest)


def too_old(versions: dict[str, str]) -> str:
    """Names the versions, of Python, Ray and torch, that are older than raypp needs; "" if none."""
    old = [
        f"{name} {versions[name]} (raypp needs {oldest} or newer)"
        for name, oldest in OLDEST.items()
        if versions.get(name) and is_older(versions[name], oldest)
    ]
    return ", ".join(old)


def check_node(place: str) -> None:
    """Checks this process' environment before anything heavy is imported. `place`: the node's name,
    for the error. Raises JobError: something is missing or too old; names all of it."""
    versions = {"python": platform.python_version()} | {name: _version(name) for name in ON_NODES}
    fix = "install `raypp[node]` there, into the Python that runs Ray"
    problems = []
    missing = [name for name, version in versions.items() if not version]
    if missing:
        fault = f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed"
        problems.append(Problem(place, fault, fix))
    if old := too_old(versions):
        problems.append(Problem(place, f"has {old}", fix))
    if problems:
        raise JobError(problems)


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _numbers(version: str) -> tuple[int, ...]:
    match = re.match(r"\d{1,9}(\.\d{1,9}){0,3}", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()
