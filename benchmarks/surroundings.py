"""The context of a figure: hardware, versions, commit."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def describe() -> str:
    """Returns one line with date, processor, cores, memory, versions and commit."""
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.processor(),
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout
    dirty = subprocess.run(["git", "status", "--porcelain"], capture_output=True, text=True, check=False).stdout
    packages = ", ".join(f"{name} {found}" for name in ("torch", "ray", "boto3") if (found := _version(name)))
    today = datetime.datetime.now(tz=datetime.UTC).date()
    return (
        f"{today}, {model}, {os.cpu_count()} cores, {memory:.0f} GiB, Python {platform.python_version()}, {packages}, "
        f"commit {commit.strip()}{' + changes' if dirty else ''}"
    )


def _version(package: str) -> str:
    """Returns a package's version; "" if it is not installed, as Ray may be under torchrun."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
