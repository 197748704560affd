"""How every benchmark begins: its options, and the context of its figures."""

import argparse
import datetime
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

MOST_BUSY = 0.25
"""Share of the cores that other programs may use. Above it, figures are theirs as well."""
OWN_LOAD = "RAYPP_BENCHMARK_BEFORE"
"""Set by `benchmarks.run` for the benchmarks after the first: the load average of the last minute
is then that of the benchmark before."""
_SAMPLE_S = 0.5
_REPOSITORY = Path(__file__).parents[1]


def begin(description: str | None, more: str = "", /, **options: tuple[Any, ...]) -> argparse.Namespace:
    """Parses the options of a benchmark, then calls `announce`. `options`: default, help, and the
    choices if there are some. A list takes several values; False makes a flag."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{Path(sys.argv[0]).stem}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for name, (default, words, *choices) in options.items():
        flag, several = f"--{name.replace('_', '-')}", isinstance(default, list)
        if default is False:
            parser.add_argument(flag, action="store_true", help=words)
            continue
        parser.add_argument(
            flag, default=default, type=type(default[0] if several else default), nargs="+" if several else None,
            choices=choices[0] if choices else None, help=f"{words} (default: %(default)s)",
        )  # fmt: skip
    given = parser.parse_args()
    announce(more)
    return given


def announce(more: str = "") -> None:
    """Prints a benchmark's header line, with `more`, such as the version of a library, and a
    warning on stderr if other programs use the cores."""
    busy, load = busy_cores(), os.getloadavg()[0]
    print(f"{describe()}{', ' if more else ''}{more}\n", flush=True)
    if reason := too_busy(load, busy, os.cpu_count() or 1, after_another=bool(os.environ.get(OWN_LOAD))):
        print(f"warning: {reason}", file=sys.stderr, flush=True)


def too_busy(load: float, busy: float, cores: int, *, after_another: bool = False) -> str:
    """Returns why this machine is too busy to measure; "" if it is quiet. `load`: average of the
    last minute. `busy`: cores that are busy now. `after_another`: a benchmark has just ended, so
    `load` says nothing."""
    bound = MOST_BUSY * cores
    if busy <= bound and (load <= bound or after_another):
        return ""
    return (
        f"load average {load:.1f}, {busy:.1f} of {cores} cores busy before the benchmark starts (bound: {bound:.1f}): "
        "its times and ratios will not hold on a quiet machine; end other programs and wait a minute"
    )


def busy_cores() -> float:
    """Measures how many cores other programs use now, those of other virtual machines included."""
    before, started = _used_ticks(), time.monotonic()
    time.sleep(_SAMPLE_S)
    used, seconds = _used_ticks() - before, time.monotonic() - started
    return used / os.sysconf("SC_CLK_TCK") / seconds


def _used_ticks() -> int:
    """Returns the ticks in which a core ran a program, or another virtual machine ran on it."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().partition("\n")[0].split()[1:]]
    return sum(ticks[:3]) + sum(ticks[5:8])  # without what is idle, and waits for disks


def describe() -> str:
    """Returns one line with date, processor, cores, load average, memory, versions and commit."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    packages = ", ".join(f"{name} {found}" for name in ("torch", "ray", "boto3") if (found := _version(name)))
    today = datetime.datetime.now(tz=datetime.UTC).date()
    return (
        f"{today}, {_processor()}, {os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}, {memory:.0f} GiB, "
        f"Python {platform.python_version()}, {packages}, raypp {_commit()}"
    )


def _processor() -> str:
    """Returns the processor's name, with the numbers that tell generations of one name apart."""
    facts: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        facts.setdefault(name.strip(), value.strip())
    name = facts.get("model name") or platform.processor() or platform.machine()
    if "cpu family" in facts and "model" in facts:
        return f"{name} (family {facts['cpu family']}, model {facts['model']})"
    return name


def _commit() -> str:
    """Returns raypp's commit; its version outside a repository."""
    commit = _git("rev-parse", "--short", "HEAD")
    if not commit:
        return _version("raypp") or "without a version"
    return f"commit {commit}{' + changes' if _git('status', '--porcelain') else ''}"


def _git(*words: str) -> str:
    command = ["git", "-C", str(_REPOSITORY), *words]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""


def _version(package: str) -> str:
    """Returns a package's version; "" if it is not installed, as Ray may be under torchrun."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
