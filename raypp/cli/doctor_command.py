"""`raypp doctor`: checks a cluster before a job runs into its problems."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import click

from raypp.api.checked_job import grounds_of, load_checked_job
from raypp.cli.console import Console, Lines, Table, Text
from raypp.cli.options import set_option
from raypp.cli.output import check_writable, echo, echo_json, echo_lines, problem_parts, styled, write_file
from raypp.control import client
from raypp.control.cluster_call import Call, ask
from raypp.control.clusters.find import Cluster, find_cluster, lend_store_settings
from raypp.control.find_run import find_run
from raypp.errors import EXIT_OK, EXIT_RUN_FAILED, JobError, Problem, RayppError, ResourcesError
from raypp.job.load import job_document
from raypp.job.secret import without_secrets
from raypp.planning.costs import device_named
from raypp.planning.plan import make_plan
from raypp.tools.doctor.driver import ProbeOptions
from raypp.tools.doctor.findings import Finding, Severity, findings, links_document
from raypp.tools.doctor.first_hour import TEMPLATES, Cards, Done, Step, page, steps
from raypp.untrusted.files import expand_home
from raypp.untrusted.text import shell_word

_EXAMINATION_S = 1800.0
_WORDS = {
    Severity.BREAKS: "breaks a run",
    Severity.EXPOSES: "exposes a run",
    Severity.SLOWS: "slows a run",
    Severity.NOTE: "note",
}
_COLOURS = {Severity.BREAKS: "red", Severity.EXPOSES: "red", Severity.SLOWS: "yellow", Severity.NOTE: "cyan"}

_LIMIT_S = 3600.0
_KEPT = 6000
_PROGRAMS = {"raypp": (sys.executable, "-m", "raypp"), "python": (sys.executable,)}


@click.command("doctor")
@click.argument("job", required=False, type=click.Path(path_type=Path))
@set_option
@click.option("--address", metavar="A", help="URL of the cluster's dashboard.  [default: as for submit]")
@click.option("--store", "store_url", metavar="URL", help="Store to test from every node.  [default: the job's]")
@click.option("--out", type=click.Path(path_type=Path), help="Write a file for `raypp plan --links`.")
@click.option("--seconds", default=0.6, show_default=True, help="Length of each bandwidth measurement.")
@click.option("--no-devices", is_flag=True, help="Skip the matrix product on every device.")
@click.option("--nccl", is_flag=True, help="Run NCCL between the GPUs, and look at what arrives.")
@click.option("--first-hour", "hour", is_flag=True, help="Run ten checks of new cards; write a page to send to us.")
@click.option("--nodes", default="", metavar="A,B", help="With --first-hour: the nodes it may use.  [default: all]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def doctor_command(
    job: Path | None,
    overrides: tuple[str, ...],
    address: str | None,
    store_url: str | None,
    out: Path | None,
    seconds: float,
    no_devices: bool,
    nccl: bool,
    hour: bool,
    nodes: str,
    as_json: bool,
) -> None:
    """Check every node of a cluster, each link between two nodes, and the store.

    With JOB, check what it needs: also that each node can read its data, every part of a mixture,
    and its tokenizer.

    With --first-hour, run ten checks of new cards in order on whatever cards there are, and write
    what they printed to first-hour.md (or --out). Without cards, run what CPUs can.

    Exits with code 0 if all is fine, 1 if something will break a run, 3 if there is no cluster.
    """
    if hour and (job is not None or as_json):
        what = "--json" if as_json else "JOB"
        raise JobError(Problem("--first-hour", f"it does not take {what}", f"leave out {what}"))
    if nodes and not hour:
        raise JobError(Problem("--nodes", "it limits --first-hour only", "leave it out, or add --first-hour"))
    out = Path("first-hour.md") if hour and out is None else out
    checked = load_checked_job(job, overrides).job if job is not None else None
    if job is None and overrides:
        raise JobError(Problem("--set", "needs a JOB whose value it replaces", "give the job file first"))
    if out is not None:
        check_writable(out)
    cluster = find_cluster(address)
    lend_store_settings(cluster.embedded)
    cluster.dashboard.check_versions()
    url = store_url or (checked.checkpoint.url if checked else "")
    if url and not re.match(r"^[a-z0-9]+://", url):
        url = str(expand_home(url).absolute())
    examined = without_secrets(job_document(checked)) if checked else None
    here = cluster.embedded is not None
    if hour and not (url or here):
        fix = "give s3://…, or a directory that all nodes share"
        raise JobError(Problem("--store", "the runs of --first-hour need a store that all nodes reach", fix))
    seconds = max(0.05, min(seconds, 60.0))
    options = ProbeOptions(url, examined, seconds, hour or not no_devices, hour or nccl, share_environment=here)
    start = time.monotonic()
    keys, settings = client.collect_secrets(here=here), client.collect_settings(cluster)
    words = (options.as_argument(),)
    call = Call("doctor", "raypp.tools.doctor.driver", words, keys, settings, timeout_s=_EXAMINATION_S)
    report = ask(cluster, call, lambda text: echo(f"  {text.rstrip()}", err=True))
    results = findings(report)
    if hour:
        assert out is not None
        cards = cards_of(report, nodes, url)
        write_file(Path("links.json"), (json.dumps(links_document(report), indent=2) + "\n").encode())
        passed = first_hour(report, results, time.monotonic() - start, cluster, cards, out)
        raise SystemExit(EXIT_OK if passed else EXIT_RUN_FAILED)
    if checked is not None:
        try:
            client.check_resources(checked, cluster)
        except ResourcesError as error:
            results = [Finding(Severity.BREAKS, problem) for problem in error.problems] + results
    if as_json:
        echo_json({**report, "findings": [finding.as_dict() for finding in results]})
    else:
        _show(report, results, bool(url))
    if out is not None:
        write_file(out, (json.dumps(links_document(report), indent=2) + "\n").encode())
        echo(f"wrote {out}; use it with `raypp plan JOB --links {shell_word(out)}`", err=True)
    raise SystemExit(EXIT_RUN_FAILED if any(one.severity is Severity.BREAKS for one in results) else EXIT_OK)


def _show(report: dict[str, Any], results: list[Finding], store_asked: bool) -> None:
    console = Console()
    console.print(_nodes(report))
    console.print(_machines(report))
    if any(_ports(node) for node in report["nodes"]):
        console.print(_hcas(report))
    if report["links"]:
        console.print()
        console.print(_matrix(report))
        console.print("rows send to columns: Gbit/s, half a round trip; † not over the node's main interface")
        skews = [abs(link["skew_s"]) for link in report["links"] if "skew_s" in link]
        if skews:
            console.print(f"clocks: within {max(0.1, max(skews) * 1e3):.3g} ms of each other")
            console.print()
    if report.get("groups"):
        console.print(_groups(report))
        console.print()
    if report["store"]:
        console.print(_store(report["store"]))
        console.print()
    elif not store_asked:
        console.print("store: not tested; give a JOB, or --store URL")
        console.print()
    for finding in results:
        colour = _COLOURS[finding.severity]
        echo_lines(styled(_WORDS[finding.severity], fg=colour), ": ", *problem_parts(finding.problem))
    if not results:
        echo("no problems found")


def _titled(title: str, *columns: str) -> Table:
    return Table(*columns, title=Text(title), title_justify="left")


def _nodes(report: dict[str, Any]) -> Table:
    table = _titled("nodes", "node", "host", "python", "torch", "ray", "interface")
    for node in report["nodes"]:
        if "error" in node:
            table.add_row(node["ip"], node["hostname"], Text("does not respond", "red"))
            continue
        own = next((one for one in node["interfaces"] if one["address"] == node["ip"]), None)
        speed = f", {own['mbps'] / 1000:g} Gbit/s" if own and own["mbps"] else ""
        versions = node["packages"]
        torch = (node.get("torch") or {}).get("torch") or versions["torch"] or "–"
        interface = f"{own['name']}{speed}" if own else "–"
        table.add_row(node["ip"], node["hostname"], node["python"], torch, versions["ray"] or "–", interface)
    return table


def _machines(report: dict[str, Any]) -> Table:
    table = _titled("", "node", "devices", "slots", "memory", "/dev/shm", "disk free")
    for node in report["nodes"]:
        if "error" not in node:
            free = (_gib(node[name]) for name in ("memory_free", "shm_free", "disk_free"))
            table.add_row(node["ip"], _devices(node), f"{node['cpus']:g}", *free)
    return table


def _ports(node: dict[str, Any]) -> list[dict[str, Any]]:
    return list(node.get("infiniband", {}).get("ports", ()))


def _hcas(report: dict[str, Any]) -> Table:
    table = _titled("", "node", "HCA", "port", "rate", "interface", "GID", "NCCL takes it", "may lock")
    for node in report["nodes"]:
        for port in _ports(node):
            limit, gid = node["infiniband"]["memlock"], "–" if port["gid"] is None else str(port["gid"])
            facts = (f"{port['name']}:{port['port']}", f"{port['state']}, {port['layer']}", port["rate"])
            may = "all" if limit is None else _gib(limit)
            table.add_row(node["ip"], *facts, port["interface"] or "–", gid, "yes" if port["taken"] else "no", may)
    return table


def _devices(node: dict[str, Any]) -> str:
    seen = node.get("torch") or {}
    if seen.get("devices"):
        first = seen["devices"][0]
        facts = [f"{first['flops'] / 1e12:.0f} TFLOP/s", _gib(first.get("memory"))]
        if "capability" in first:
            facts.append(f"SM {'.'.join(map(str, first['capability']))}")
        facts += [f"{name} {seen[name.lower()]}" for name in ("driver", "NCCL") if seen.get(name.lower())]
        return f"{len(seen['devices'])} × {first['kind']} ({', '.join(facts)})"
    if seen.get("cpu"):
        return f"CPU, {seen['cpu']['flops'] / 1e9:.0f} GFLOP/s a core"
    return f"{node['gpus']:g} GPUs" if node["gpus"] else "CPU"


def _gib(count: int | None) -> str:
    return "–" if count is None else f"{count / 2**30:.1f} GiB"


def _matrix(report: dict[str, Any]) -> Table:
    nodes = [node["ip"] for node in report["nodes"]]
    every = [(node["ip"], one) for node in report["nodes"] for one in node.get("interfaces", ())]
    carries = {ip: one["name"] for ip, one in every if one["address"] == ip}
    cells: dict[tuple[str, str], Text] = {}
    for link in report["links"]:
        if "error" in link:
            cells[link["from"], link["to"]] = cells[link["to"], link["from"]] = Text("none", "red")
            continue
        mark = "" if link["interface"] == carries.get(link["from"], "") else "†"
        for key, rate in (((link["from"], link["to"]), "gbps_out"), ((link["to"], link["from"]), "gbps_in")):
            cells[key] = Lines(f"{link[rate]:.3g}{mark}\n{link['latency_ms']:.2g} ms")
    table = _titled("links", "", *nodes)
    for row in nodes:
        table.add_row(row, *("–" if row == column else cells.get((row, column), "") for column in nodes))
    return table


def _groups(report: dict[str, Any]) -> Table:
    table = _titled("groups", "", "nodes", "ranks", "works", "sums", "to a neighbour")
    for group in report["groups"]:
        last = group["tries"][-1]
        facts = (group["kind"], ", ".join(group["nodes"]), str(group["ranks"]))
        if "error" in last:
            table.add_row(*facts, Text("no", "red"), "–", "–")
        else:
            works = f"without {last['off']}" if last["off"] else "yes"
            table.add_row(*facts, works, *(f"{last[name]:.3g} GB/s" for name in ("all_reduce", "exchange")))
    return table


def _store(store: dict[str, Any]) -> Table:
    table = _titled(f"store {store['url']}", "node", "rights", "up", "down")
    for node in store["nodes"]:
        if "error" in node:
            table.add_row(node["ip"], Text("no", "red"), "–", "–")
        else:
            table.add_row(node["ip"], "all", f"{node['up_mbps']:.0f} MB/s", f"{node['down_mbps']:.0f} MB/s")
    return table


def cards_of(report: dict[str, Any], named: str, store: str) -> Cards:
    """Returns what an examination found to check. `named`: the nodes that the checks may use, with
    commas; "": all. Raises JobError: a named node is not there, or runs could be on others."""
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
    `report`: of the examination, the first check. Returns whether no check failed."""
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
