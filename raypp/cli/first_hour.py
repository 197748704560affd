"""Runs the checks of `raypp doctor --first-hour` and writes their page."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from raypp.api.checked_job import grounds_of, load_checked_job
from raypp.cli.output import echo, styled, write_file
from raypp.control.clusters.find import Cluster
from raypp.control.find_run import find_run
from raypp.errors import JobError, Problem, RayppError
from raypp.planning.costs import device_named
from raypp.planning.plan import make_plan
from raypp.tools.doctor.findings import Finding, Severity
from raypp.tools.doctor.first_hour import TEMPLATES, Cards, Done, Step, page, steps

_LIMIT_S = 3600.0
_KEPT = 6000
_PROGRAMS = {"raypp": (sys.executable, "-m", "raypp"), "python": (sys.executable,)}


def cards_of(report: dict[str, Any], named: str, store: str) -> Cards:
    """Returns what an examination found to check. `named`: the nodes that the checks may use, with
    commas; "": all. Raises JobError: a node that is named is not there, or runs could be placed on
    others."""
    working = [node for node in report["nodes"] if "error" not in node]
    kinds = [card["kind"] for node in working for card in (node.get("torch") or {}).get("devices") or ()]
    there = {node["ip"]: int(node["gpus" if kinds else "cpus"]) for node in working}
    there = {node: count for node, count in there.items() if count}
    wanted = {name.strip() for name in named.split(",")} if named else there.keys()
    if unknown := sorted(wanted - there.keys()):
        fault = f"no node {unknown[0] or '(an empty name)'} with devices is in the cluster"
        raise JobError(Problem("--nodes", fault, f"use {','.join(there)}"))
    if others := sorted(there.keys() - wanted):
        fault = f"Ray could place runs on {', '.join(others)}, too"
        raise JobError(Problem("--nodes", fault, "name these nodes as well, or stop Ray there for this hour: ray stop"))
    try:
        device = device_named(kinds[0]).name if kinds else "cpu"
    except JobError:
        device = "cuda"

    def fits(template: str, settings: Iterable[str]) -> bool:
        try:
            job = load_checked_job(TEMPLATES / f"{template}.yaml", list(settings)).job
            grounds = grounds_of(job, device=device, link_gbps=None, links="links.json", per_node=None, costs=None)
            return make_plan(job, grounds).fits is not False
        except RayppError:
            return False

    sources, profiler = Path("tests/gpu").is_dir() and Path("benchmarks").is_dir(), shutil.which("nsys") is not None
    kind, nodes = next(iter(kinds), ""), tuple(there.items())
    return Cards(
        nodes, kind, device, sources, profiler, fits, lambda run: find_run(run)[1].reports()[-1].peak_bytes, store
    )


def first_hour(
    report: dict[str, Any], results: Sequence[Finding], taken_s: float, cluster: Cluster, cards: Cards, out: Path
) -> bool:
    """Runs all checks, prints each result, and writes the page, also when it is interrupted.
    `report`: of the examination, which is the first check; with its findings and seconds. Returns
    whether no check failed."""
    sums = "; inside a node of H100: sums 300 GB/s, to a neighbour 150; between nodes 40 GB/s per rank"
    examination = Step(
        "The cluster and its links", f"nothing that breaks a run{sums if cards.kind else ''}",
        "do what each finding says and start again: the other checks build on this one", "",
        (("raypp", "doctor", "--nccl", "--out", "links.json"),),
    )  # fmt: skip
    breaks = "; ".join(one.problem.fault for one in results if one.severity is Severity.BREAKS)
    shown = [f"{one.severity}: {one.problem}" for one in results]
    shown += [f"{one['kind']} on {', '.join(one['nodes'])}: {one['tries']}" for one in report["groups"]]
    done = [Done(examination, breaks, "\n".join(shown), taken_s)]
    environment = os.environ | {"RAYPP_ADDRESS": cluster.address, "COLUMNS": "120"}
    _tell(1, done[0])
    try:
        for number, step in enumerate(steps(cards, time.strftime("hour-%m%d-%H%M%S")), 2):
            done.append(_run(step, environment))
            _tell(number, done[-1])
    finally:
        packages: dict[str, Any] = next((node["packages"] for node in report["nodes"] if "error" not in node), {})
        versions = ", ".join(f"{name} {version}" for name, version in packages.items() if version)
        write_file(out, page(done, cards, versions, report["measured"]).encode())
        echo(f"wrote {out}: send this page to raypp's developers", err=True)
    return not any(one.fault for one in done)


def _tell(number: int, one: Done) -> None:
    colour = "red" if one.fault else "yellow" if one.step.skipped else "green"
    echo(f"{number:2}. {one.step.title}: ", styled(one.words, fg=colour))
    if one.fault:
        echo(f"    must print: {one.step.expects}")
        echo(f"    if not: {one.step.otherwise}")


def _run(step: Step, environment: dict[str, str]) -> Done:
    """Runs a check's commands until one fails, and looks at what they printed."""
    start, printed, shown, fault = time.monotonic(), list[str](), list[str](), ""
    for words in () if step.skipped else step.commands:
        name = " ".join(words[:2])
        command = [*_PROGRAMS.get(words[0], (words[0],)), *words[1:]]
        try:
            done = subprocess.run(command, env=environment, capture_output=True, timeout=_LIMIT_S, check=False)
        except subprocess.TimeoutExpired:
            fault = f"`{name}` takes more than {_LIMIT_S:.0f} s; `raypp list` shows a run that goes on"
            break
        said, errors = done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")
        printed.append(said)
        shown += [f"$ {name}", said[-_KEPT:], errors[-_KEPT:] if done.returncode else ""]
        if done.returncode:
            fault = (
                f"`{name}` exited with {done.returncode}: {''.join((errors.strip() or said.strip()).splitlines()[-1:])}"
            )
            break
    try:
        fault = fault if fault or step.skipped else step.check(printed)
    except (LookupError, TypeError, ValueError) as error:
        fault = f"what was printed cannot be read: {error!r}"
    return Done(step, fault, "\n".join(shown), time.monotonic() - start)
