"""`python -m raypp.tools.doctor.driver OPTIONS`: the driver of `raypp doctor`, in the cluster. It
starts one actor on each node, and reports progress, and at the end what it found."""

import json
import os
import secrets
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from raypp.control.calls import print_report, serve
from raypp.control.credentials import PROFILE, SECRETS, SETTINGS, collect
from raypp.control.group_test import GROUP_TIMEOUT_S, slowest
from raypp.tools.doctor.node import NodeProbe
from raypp.untrusted.text import visible

_START_S = 60.0
_DEVICES_S = 150.0
_STORE_S = 300.0
_LINK = "{gbps_out:.3g} and {gbps_in:.3g} Gbit/s, {latency_ms:.3g} ms"
_GROUP = "{all_reduce:.3g} GB/s in sums, {exchange:.3g} to a neighbour"
_STORE = "{up_mbps:.0f} MB/s up, {down_mbps:.0f} down"
MANY_NODES = 16
"""Up to this many nodes, pairs are measured one at a time. With more, pairs without a common node
are measured at the same time."""


@dataclass(frozen=True)
class ProbeOptions:
    """What to examine.

    Attributes:
        store_url: The store that every node tries; empty: none.
        job: The job whose data every node needs; None: none.
        devices: Whether to run a matrix product on every device.
        groups: Whether to run NCCL between the GPUs, gloo where there is none.
        share_environment: Whether every node uses the store settings and keys of the driver's
            environment. The embedded cluster needs it, because no Ray job carries them there.
    """

    store_url: str = ""
    job: dict[str, Any] | None = None
    seconds: float = 0.6
    devices: bool = True
    groups: bool = False
    share_environment: bool = False

    def as_argument(self) -> str:
        """Encodes the options as one command-line argument."""
        return json.dumps(asdict(self))


def rounds(count: int, at_once: bool = False) -> list[list[tuple[int, int]]]:
    """Returns all pairs of `count` nodes in rounds. The pairs of a round have no node in common and
    are measured together; those of few nodes one by one, unless `at_once`."""
    if count <= MANY_NODES and not at_once:
        return [[(one, other)] for one in range(count) for other in range(one + 1, count)]
    seats = [*range(count), *([-1] if count % 2 else [])]
    pairings = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
        pairings.append([(min(pair), max(pair)) for pair in pairs if -1 not in pair])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return pairings


class Examination:
    """Examines all live nodes of the cluster from inside."""

    def __init__(self, options: ProbeOptions) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self._options = options
        self._ray = ray
        token = secrets.token_hex(32)
        known: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
        self._nodes = sorted((node for node in known if node["Alive"]), key=lambda node: node["NodeManagerAddress"])
        shared = collect(SECRETS + SETTINGS + PROFILE, dict(os.environ)) if options.share_environment else {}
        actor: Any = ray.remote(NodeProbe)
        self._actors = [
            actor.options(
                num_cpus=0,
                max_concurrency=4,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
            ).remote(token, shared)
            for node in self._nodes
        ]
        self._report: list[dict[str, Any]] = []

    def report(self) -> dict[str, Any]:
        """Runs all measurements and returns the report. Failures become `error` entries."""
        self._look_around()
        working = [index for index, one in enumerate(self._report) if "error" not in one]
        if self._options.job is not None:
            _print_progress("data: looking for the job's files on every node")
            asked = {index: self._actors[index].data_problems.remote(self._options.job) for index in working}
            for index, answer in self._gather(asked, _STORE_S).items():
                if isinstance(answer, dict):
                    answer = [["data", f"cannot be examined: {answer['error']}", "read Ray's logs on that node"]]
                self._report[index]["data"] = answer
        if self._options.devices:
            _print_progress("devices: running a matrix product on each")
            asked = {index: self._actors[index].devices.remote() for index in working}
            for index, answer in self._gather(asked, _DEVICES_S).items():
                self._report[index]["torch"] = answer
        groups = self._groups(working) if self._options.groups else []
        links = self._links(working)
        store = self._store(working) if self._options.store_url else None
        for index in working:
            self._ray.kill(self._actors[index])
        report = {"nodes": self._report, "links": links, "groups": groups, "store": store}
        return {"measured": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **report}

    def _look_around(self) -> None:
        _print_progress(f"{len(self._nodes)} node{'' if len(self._nodes) == 1 else 's'}")
        asked = {
            index: actor.facts.remote(node["NodeManagerAddress"])
            for index, (actor, node) in enumerate(zip(self._actors, self._nodes, strict=True))
        }
        answers = self._gather(asked, _START_S)
        for index, node in enumerate(self._nodes):
            has = node["Resources"]
            basis = {
                "node_id": node["NodeID"],
                "ip": node["NodeManagerAddress"],
                "hostname": node["NodeManagerHostname"],
                "cpus": has.get("CPU", 0),
                "gpus": has.get("GPU", 0),
            }
            self._report.append(basis | answers[index])

    def _links(self, working: list[int]) -> list[dict[str, Any]]:
        if len(working) < 2:
            return []
        ports = self._gather({index: self._actors[index].listen.remote(self._ip(index)) for index in working}, _START_S)
        links: list[dict[str, Any]] = []
        for pairs in rounds(len(working)):
            asked, answers = {}, {}
            for one, other in ((working[first], working[second]) for first, second in pairs):
                port, seconds = ports[other], self._options.seconds
                if isinstance(port, dict):
                    answers[one, other] = port
                else:
                    asked[one, other] = self._actors[one].measure.remote(self._ip(other), port, seconds)
            answers |= self._gather(asked, 60 + 4 * self._options.seconds)
            for (one, other), answer in answers.items():
                links.append({"from": self._ip(one), "to": self._ip(other), **answer})
                _print_progress(f"link {self._ip(one)} – {self._ip(other)}: {_words(answer, _LINK)}")
        return links

    def _groups(self, working: list[int]) -> list[dict[str, Any]]:
        """Tries NCCL among the GPUs of each node, of each two nodes, and of all; else gloo."""
        devices = {index: self._devices_of(index) for index in working}
        devices = {node: names for node, names in devices.items() if names} or {node: ["cpu"] * 2 for node in working}
        every = list(devices)
        turns = [[[index]] for index, names in devices.items() if len(names) > 1]
        if len(every) > 2 and devices[every[0]][0] != "cpu":
            turns += [[[every[one], every[other]] for one, other in pairs] for pairs in rounds(len(every), True)]
        turns += [[every]] if len(every) > 1 else []
        with ThreadPoolExecutor() as pool:
            return [one for turn in turns for one in pool.map(lambda group: self._try_group(group, devices), turn)]

    def _devices_of(self, index: int) -> list[str]:
        seen = self._report[index].get("torch")
        count = int(self._report[index]["gpus"]) if seen is None else len(seen.get("devices", ()))
        return [f"cuda:{number}" for number in range(count)]

    def _try_group(self, group: list[int], devices: dict[int, list[str]]) -> dict[str, Any]:
        first, nodes = group[0], [self._ip(index) for index in group]
        names = [(index, name) for index in group for name in devices[index]]
        kind, tries = "gloo" if names[0][1] == "cpu" else "NCCL", list[dict[str, Any]]()
        for off in ("", "P2P", "SHM", "IB") if kind == "NCCL" else ("",):
            port = self._gather({0: self._actors[first].free_port.remote(nodes[0])}, _START_S)[0]
            if isinstance(port, dict):
                tries.append({"off": off, **port})
                break
            asked = {}
            for index in group:
                ranks = [(rank, name) for rank, (one, name) in enumerate(names) if one == index]
                peer = next((ip for ip in nodes if ip != self._ip(index)), nodes[0])
                asked[index] = self._actors[index].try_group.remote(
                    ranks, len(names), len(nodes), nodes[0], port, peer, off
                )
            tries.append({"off": off, **slowest(list(self._gather(asked, GROUP_TIMEOUT_S + _START_S).values()))})
            _print_progress(
                f"{kind} on {', '.join(nodes)}{f' without {off}' if off else ''}: {_words(tries[-1], _GROUP)}"
            )
            if "error" not in tries[-1]:
                break
        return {"nodes": nodes, "kind": kind, "ranks": len(names), "tries": tries}

    def _store(self, working: list[int]) -> dict[str, Any]:
        url, nonce = self._options.store_url, secrets.token_hex(6)
        marks = {index: f".raypp-doctor-{nonce}/{index}" for index in working}
        results: dict[int, Any] = {}
        for index in working:
            asked = {index: self._actors[index].try_store.remote(url, marks[index])}
            results |= self._gather(asked, _STORE_S)
            _print_progress(f"store from {self._ip(index)}: {_words(results[index], _STORE)}")
        written = [marks[index] for index in working if "error" not in results[index]]
        seen = self._gather({index: self._actors[index].sees.remote(url, written) for index in working}, _START_S)
        for index in working:
            visible = seen[index] if isinstance(seen[index], list) else []
            hidden = [other for other in working if marks[other] in written and marks[other] not in visible]
            results[index]["hidden_from_it"] = [self._ip(other) for other in hidden]
        self._gather({index: self._actors[index].forget.remote(url, marks[index]) for index in working}, _START_S)
        return {"url": url, "nodes": [{"ip": self._ip(index), **results[index]} for index in working]}

    def _ip(self, index: int) -> str:
        return str(self._nodes[index]["NodeManagerAddress"])

    def _gather(self, asked: dict[Any, Any], timeout_s: float) -> dict[Any, Any]:
        """Waits for answers and returns them by key; `{"error": …}` for a failure or timeout."""
        if asked:
            self._ray.wait(list(asked.values()), num_returns=len(asked), timeout=timeout_s)
        answers = {}
        for key, reference in asked.items():
            try:
                answers[key] = self._ray.get(reference, timeout=0.1)
            except self._ray.exceptions.GetTimeoutError:
                answers[key] = {"error": f"no answer within {timeout_s:.0f} s"}
            except self._ray.exceptions.RayError as error:
                answers[key] = {"error": str(error).strip().splitlines()[-1][:400]}
        return answers


def _print_progress(text: str) -> None:
    print_report({"progress": visible(text)})


def _words(answer: dict[str, Any], words: str) -> str:
    """Returns the error of an answer, or what it measured."""
    return str(answer["error"]) if "error" in answer else words.format_map(answer)


def examine(options: str) -> dict[str, Any]:
    """Examines the cluster, and returns the report. `options`: `ProbeOptions.as_argument`."""
    import ray

    return Examination(ProbeOptions(**json.loads(options))).report() | {"ray": ray.__version__}


if __name__ == "__main__":
    serve(lambda: [examine(sys.argv[1])])
