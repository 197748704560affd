"""Turns the measurements of `raypp doctor` into problems and fixes, without side effects."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from raypp.environment import OLDEST, too_old
from raypp.errors import Problem
from raypp.job.precision import BF16
from raypp.kinds import data_urls, shared_forms
from raypp.tools.doctor.hcas import hca_problems

SKEW_BREAKS_S = 300.0
SKEW_REPORTED_S = 1.0
LOOKUP_REPORTED_S = 1.0
SHM_BYTES = 1 << 30
DISK_BYTES = 2 << 30
_INSTALL = "install `raypp[node]` there, into the Python that runs Ray"
_SAME = ("python", "torch", "ray", "cuda", "nccl")


_REASONS = {
    "P2P": ", or update the driver and turn off the IOMMU and PCI ACS: cards do not read each other's memory correctly",
    "SHM": ", or give containers more shared memory (--shm-size=8g)",
    "IB": ", or configure InfiniBand or RoCE on these nodes (`ibstat`, `ulimit -l`)",
}


class Severity(StrEnum):
    """breaks: runs fail or hang. exposes: others can take part. slows: runs are slower, or fail
    later. note: information."""

    BREAKS = "breaks"
    EXPOSES = "exposes"
    SLOWS = "slows"
    NOTE = "note"


@dataclass(frozen=True)
class Finding:
    """A problem that the examination found."""

    severity: Severity
    problem: Problem

    def as_dict(self) -> dict[str, str]:
        """Returns the finding as `raypp doctor --json` prints it."""
        problem = self.problem
        return {"severity": str(self.severity), "key": problem.key, "what": problem.fault, "fix": problem.fix}


def findings(report: dict[str, Any]) -> list[Finding]:
    """Returns all findings of a report, the most severe first."""
    all_findings: list[Finding] = []
    for look in (
        _silent_nodes,
        _versions,
        _data,
        _links,
        _groups,
        _hcas,
        _rates,
        _clocks,
        _machines,
        _store,
        _devices,
        _cards,
    ):
        all_findings += look(report)
    return sorted(all_findings, key=lambda finding: list(Severity).index(finding.severity))


def _working(report: dict[str, Any]) -> list[dict[str, Any]]:
    return [node for node in report["nodes"] if "error" not in node]


def _found(severity: Severity, fault: str, fix: str) -> Finding:
    return Finding(severity, Problem("", fault, fix))


def _silent_nodes(report: dict[str, Any]) -> Iterator[Finding]:
    for node in report["nodes"]:
        if "error" in node:
            fix = (
                "read Ray's logs on that node, and check that Python and raypp's dependencies are installed as on "
                "the other nodes"
            )
            yield _found(Severity.BREAKS, f"no worker answers on node {node['ip']}: {node['error']}", fix)
    if not report["nodes"]:
        yield _found(Severity.BREAKS, "the cluster has no node", "start one: ray start --address=HEAD:6379")


def _versions(report: dict[str, Any]) -> Iterator[Finding]:
    for name in _SAME:
        by_version: dict[str, list[str]] = defaultdict(list)
        for node in _working(report):
            version = _version_of(node, name)
            if version:
                by_version[version].append(node["ip"])
        if len(by_version) > 1:
            listed = ", ".join(f"{version} on {_some(nodes)}" for version, nodes in sorted(by_version.items()))
            fix = f"install the same {name} on every node (constraints.txt lists the versions raypp is tested with)"
            yield _found(Severity.BREAKS, f"the nodes have different versions of {name}: {listed}", fix)
    for name in ("torch", "boto3", "safetensors", "pydantic"):
        without = [node["ip"] for node in _working(report) if not node["packages"].get(name)]
        if without:
            yield _found(Severity.BREAKS, f"{name} is not installed on {_some(without)}", _INSTALL)
    by_old: dict[str, list[str]] = defaultdict(list)
    for node in _working(report):
        by_old[too_old({name: _version_of(node, name) or "" for name in OLDEST})].append(node["ip"])
    for old, nodes in by_old.items():
        if old:
            yield _found(Severity.BREAKS, f"{_some(nodes)} {'has' if len(nodes) == 1 else 'have'} {old}", _INSTALL)


def _version_of(node: dict[str, Any], name: str) -> str | None:
    if name in ("cuda", "nccl"):
        return (node.get("torch") or {}).get(name)
    # Ray's workers need the same minor version of Python; the patch version may differ.
    return ".".join(node["python"].split(".")[:2]) if name == "python" else node["packages"].get(name)


def _data(report: dict[str, Any]) -> Iterator[Finding]:
    by_problem: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for node in _working(report):
        for key, fault, fix in node.get("data", ()):
            by_problem[key, fault, fix].append(node["ip"])
    working = len(_working(report))
    for (key, fault, fix), nodes in by_problem.items():
        if len(nodes) < working:
            fix = (
                f"make it the same on every node: copy it, share the directory, or put it into a store ({data_urls()})"
            )
        yield Finding(Severity.BREAKS, Problem(key, f"on {_some(nodes)}: {fault}", fix))


def _links(report: dict[str, Any]) -> Iterator[Finding]:
    for link in report["links"]:
        if "error" in link:
            over = f" over {link['interface']}" if link.get("interface") else ""
            fault = f"{link['from']} cannot reach {link['to']}{over}: {link['error']}"
            fix = (
                "allow TCP on all ports between the nodes; if they share another network, start Ray on every node "
                "with --node-ip-address set to its address in that network"
            )
            if link.get("lost") and "latency_ms" in link:
                fault = (
                    f"{link['from']} cannot send much to {link['to']}{over}: small packets arrive, large ones vanish"
                )
                fix = "give every interface and switch port on the way the same MTU (`ip link`, `ping -M do -s 1472`)"
            elif link.get("lost"):
                fault += ", and no refusal: packets vanish"
                fix = (
                    "look at what drops packets on both: `iptables -S` or `nft list ruleset`, firewalld, ufw, the "
                    "cloud's security group; where nodes are containers or virtual machines behind a bridge, at "
                    f"`iptables -S FORWARD` of its host (Docker sets DROP); then {fix}"
                )
            yield _found(Severity.BREAKS, fault, fix)


def _groups(report: dict[str, Any]) -> Iterator[Finding]:
    for group in report.get("groups", ()):
        first, last = group["tries"][0], group["tries"][-1]
        if "error" not in first:
            continue
        where = f"{group['kind']} between the {group['ranks']} ranks on {_some(group['nodes'])}"
        if "error" in last:
            best = min(group["tries"], key=lambda one: not one.get("fix"))
            fix = (
                best.get("fix") or "look at `dmesg`, at the cards (nvidia-smi topo -m) and at the network between them"
            )
            yield _found(Severity.BREAKS, f"{where} does not work: {best['error']}", fix)
        else:
            setting = f"NCCL_{last['off']}_DISABLE=1"
            fault = f"{where} works only with {setting}; without: {first['error']}"
            yield _found(Severity.BREAKS, fault, f"set {setting} in resources.env{_REASONS[last['off']]}")


def _hcas(report: dict[str, Any]) -> Iterator[Finding]:
    for severity, fault, fix in hca_problems([node for node in _working(report) if node["gpus"]], report["links"]):
        yield _found(Severity(severity), fault, fix)


def _rates(report: dict[str, Any]) -> Iterator[Finding]:
    interfaces = {node["ip"]: {one["name"]: one for one in node["interfaces"]} for node in _working(report)}
    good = [link for link in report["links"] if "error" not in link]
    for link in good:
        out, back = link["gbps_out"], link["gbps_in"]
        pair = f"{link['from']} – {link['to']}"
        if min(out, back) < 0.5 * max(out, back):
            fault = f"the link {pair} is asymmetric: {out:.3g} Gbit/s one way, {back:.3g} back"
            yield _found(Severity.SLOWS, fault, "check for a duplex mismatch, a bad cable, or other traffic")
        near = interfaces[link["from"]].get(link["interface"])
        far = _with_address(interfaces.get(link["to"], {}), link["to"])
        slower = min((one for one in (near, far) if one and one["mbps"]), key=lambda one: one["mbps"], default=None)
        if slower and max(out, back) < 0.5 * slower["mbps"] / 1000:
            fault = (
                f"the link {pair} carries {max(out, back):.3g} Gbit/s; its interface {slower['name']} has "
                f"{slower['mbps'] / 1000:g}"
            )
            fix = "check for a slower switch port, a bad cable, Wi-Fi on the path, or other traffic"
            yield _found(Severity.SLOWS, fault, fix)
    for ip, known in interfaces.items():
        used_names = {link["interface"] for link in good if link["from"] == ip}
        interface = _with_address(known, ip)
        if interface and any(link["to"] == ip for link in good):
            used_names.add(interface["name"])
        fastest = max((known[name]["mbps"] for name in used_names if name in known), default=0)
        for one in known.values():
            if fastest and one["mbps"] > fastest and one["name"] not in used_names and _can_carry(one):
                fault = (
                    f"node {ip} uses {', '.join(sorted(used_names))} ({fastest / 1000:g} Gbit/s), "
                    f"but also has {one['name']} with {one['mbps'] / 1000:g}"
                )
                fix = f"start Ray there with --node-ip-address={one['address']} (and every node in that network)"
                yield _found(Severity.SLOWS, fault, fix)


def _with_address(known: dict[str, dict[str, Any]], address: str) -> dict[str, Any] | None:
    return next((one for one in known.values() if one["address"] == address), None)


def _can_carry(interface: dict[str, Any]) -> bool:
    """Whether Ray could be started with an interface's address. Not a container's virtual
    interface, whatever speed it reports, nor a link-local address."""
    link_local = interface["address"].startswith(("fe80:", "169.254."))
    return bool(interface["up"] and interface.get("physical") and not link_local)


def _clocks(report: dict[str, Any]) -> Iterator[Finding]:
    for link in report["links"]:
        skew = abs(link.get("skew_s", 0.0))
        if skew > SKEW_REPORTED_S:
            severity = Severity.BREAKS if skew > SKEW_BREAKS_S else Severity.SLOWS
            fault = f"the clocks of {link['from']} and {link['to']} differ by {skew:.1f} s"
            fix = (
                "run an NTP client on every node (chrony, systemd-timesyncd); stores reject requests from clocks "
                "that are 15 minutes off"
            )
            yield _found(severity, fault, fix)


def _machines(report: dict[str, Any]) -> Iterator[Finding]:
    def those(test: Callable[[dict[str, Any]], bool]) -> list[str]:
        return [node["ip"] for node in _working(report) if test(node)]

    if slow := those(lambda node: node["lookup_s"] > LOOKUP_REPORTED_S):
        fault = f"{_some(slow)} takes seconds to look up its own address; every rendezvous waits for this"
        yield _found(Severity.SLOWS, fault, "add the addresses and names of all nodes to /etc/hosts on every node")
    small = those(lambda node: node["shm_free"] is not None and node["shm_free"] < SHM_BYTES)
    for several in (True, False):
        if nodes := [ip for ip in small if (ip in those(lambda node: node["gpus"] > 1)) is several]:
            fault = f"less than 1 GiB of /dev/shm is free on {_some(nodes)}"
            if several:
                fault += ", where NCCL needs it between GPUs that do not reach each other's memory"
            fix = "start containers with --shm-size=8g; delete files that dead processes left in /dev/shm"
            yield _found(Severity.BREAKS if several else Severity.SLOWS, fault, fix)
    if without := those(lambda node: node["gpus"] > 0 and "compiler" in node and not node["compiler"]):
        fault = f"{_some(without)} {'has' if len(without) == 1 else 'have'} no C compiler"
        fix = "install gcc and the C library's headers (apt-get install gcc libc6-dev), or set CC"
        yield _found(Severity.SLOWS, f"{fault}: train.compile is refused there, and flex attention is not used", fix)
    if full := those(lambda node: node["disk_free"] is not None and node["disk_free"] < DISK_BYTES):
        fault = f"less than 2 GiB of disk is free where Ray keeps its files on {_some(full)}"
        yield _found(Severity.BREAKS, fault, "free disk space, or start Ray with --temp-dir on another disk")
    if exposed := those(lambda node: bool(node.get("open_folder"))):
        node = next(one for one in _working(report) if one["ip"] == exposed[0])
        fault = f"other users of {_some(exposed)} can replace Ray's files in {node['open_folder']}, so run code as you"
        fix = "there: ray stop; umask 077; ray start --temp-dir=$(mktemp -d /tmp/ray-XXXXXX)/r …, as before"
        yield _found(Severity.EXPOSES, fault, fix)
    if torchless := those(lambda node: "error" in (node.get("torch") or {})):
        node = next(one for one in _working(report) if one["ip"] == torchless[0])
        fault = f"torch does not work on {_some(torchless)}: {node['torch']['error']}"
        yield _found(Severity.BREAKS, fault, "reinstall torch there, in a build that fits the GPU driver")
    if blind := those(lambda node: "torch" in node and node["gpus"] > len(node["torch"].get("devices", ()))):
        node = next(one for one in _working(report) if one["ip"] == blind[0])
        visible = node["torch"].get("visible")
        restriction = "" if visible is None else f" (CUDA_VISIBLE_DEVICES is {visible!r} on {node['ip']})"
        if node["torch"].get("why"):
            restriction += f" ({node['torch']['why']})"
        fix = "install a CUDA build of torch that fits the driver (see nvidia-smi), and check CUDA_VISIBLE_DEVICES"
        yield _found(Severity.BREAKS, f"Ray counts more GPUs than torch sees on {_some(blind)}{restriction}", fix)


def _store(report: dict[str, Any]) -> Iterator[Finding]:
    store = report.get("store")
    if not store:
        return
    for node in store["nodes"]:
        if "error" in node:
            fix = node.get("fix") or "check the store's address, keys and permissions from that node"
            yield _found(Severity.BREAKS, f"the store {store['url']} from {node['ip']}: {node['error']}", fix)
        elif node["hidden_from_it"]:
            fault = f"{node['ip']} does not see in {store['url']} what {_some(node['hidden_from_it'])} wrote there"
            fix = f"use a shared directory (NFS) or {shared_forms()}: all nodes must see the same store"
            yield _found(Severity.BREAKS, fault, fix)
    limitations = (tuple(one) for node in store["nodes"] for one in node.get("limitations", ()))
    for fault, fix in dict.fromkeys(limitations):
        yield _found(Severity.NOTE, f"{store['url']}: {fault}", fix)


def _devices(report: dict[str, Any]) -> Iterator[Finding]:
    kinds: dict[str, list[str]] = defaultdict(list)
    for device in devices(report):
        if device["node"] not in kinds[device["kind"]]:
            kinds[device["kind"]].append(device["node"])
    if len(kinds) > 1:
        listed = "; ".join(f"{kind} on {_some(nodes)}" for kind, nodes in kinds.items())
        fix = (
            "run `raypp doctor --out links.json`, then `raypp plan JOB --links links.json`: it cuts the layers "
            "according to device speed"
        )
        yield _found(Severity.NOTE, f"the devices are unequal: {listed}", fix)
    gpus = [one for one in _measured_devices(report) if one["gpu"]]
    for kind in dict.fromkeys(one["kind"] for one in gpus):
        best = max(one["flops"] for one in gpus if one["kind"] == kind)
        slow = list(dict.fromkeys(one["node"] for one in gpus if one["kind"] == kind and one["flops"] < 0.7 * best))
        if slow:
            fault = f"a {kind} on {_some(slow)} reaches less than 70 % of the speed of the fastest {kind}"
            yield _found(Severity.SLOWS, fault, "check for overheating, a power limit, or another process (nvidia-smi)")


def _cards(report: dict[str, Any]) -> Iterator[Finding]:
    old: dict[str, list[str]] = defaultdict(list)
    drivers: dict[str, list[str]] = defaultdict(list)
    for node in _working(report):
        seen = node.get("torch") or {}
        cards = seen.get("devices") or []
        if cards and seen.get("driver"):
            drivers[seen["driver"]].append(node["ip"])
        kinds = list(dict.fromkeys(card["kind"] for card in cards))
        if len(kinds) > 1:
            fault = f"node {node['ip']} has different cards: {', '.join(kinds)}; the ranks of a stage share a node"
            fix = "start Ray with CUDA_VISIBLE_DEVICES set to those of one kind; a stage waits for its slowest card"
            yield _found(Severity.SLOWS, fault, fix)
        for card in cards:
            major, minor = card.get("capability", BF16.since)
            if (major, minor) < BF16.since and node["ip"] not in old[f"{card['kind']} ({major}.{minor})"]:
                old[f"{card['kind']} ({major}.{minor})"].append(node["ip"])
        places = [card["bus"] for card in cards if card.get("bus")]
        if len(set(places)) < len(places):
            fault = f"node {node['ip']} has parts of one card (MIG) as several devices; NCCL does not connect them"
            fix = "give a run one part of each card, or set NCCL_MULTI_RANK_GPU_ENABLE=1 (NCCL 2.30 or newer)"
            yield _found(Severity.SLOWS, fault, fix)
        for kind in dict.fromkeys(card["kind"] for card in cards if card.get("time_limit")):
            fault = f"the driver of {node['ip']} ends kernels that run for seconds on {kind}, which drives a display"
            fix = (
                "run no desktop on that card (`sudo systemctl isolate multi-user.target`, or another card for the "
                'display); or set Option "Interactive" "off" in the Device section of xorg.conf'
            )
            yield _found(Severity.BREAKS, f"{fault}: NCCL's run for as long as they wait for another rank", fix)
        for kind in dict.fromkeys(card["kind"] for card in cards if card.get("supported") is False):
            fault = f"torch on {node['ip']} has no kernels for {kind}"
            fix = "install a torch that is built for this card (an older CUDA supports older cards)"
            yield _found(Severity.BREAKS, fault, fix)
    for kind, nodes in old.items():
        fault = f"{kind} on {_some(nodes)} is too old for bf16, which needs compute capability 8.0 (A100)"
        yield _found(Severity.NOTE, fault, "train.precision auto is fp16 there, fp32 before Volta; or leave them out")
    if len(drivers) > 1:
        listed = ", ".join(f"{version} on {_some(nodes)}" for version, nodes in sorted(drivers.items()))
        yield _found(Severity.NOTE, f"the nodes have different GPU drivers: {listed}", "install the same on every node")


def devices(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns one entry per device: `node`, `kind`, `flops_rel` (fastest = 1). On a node without
    GPUs, each CPU slot is a device. All devices of a kind count as fast as the fastest of them:
    other processes on a node can only make a device look slower."""
    measured = _measured_devices(report)
    best: dict[str, float] = {}
    for one in measured:
        best[one["kind"]] = max(one["flops"], best.get(one["kind"], 0.0))
    fastest = max(best.values(), default=0.0)
    rounded = {kind: round(flops / fastest, 3) if fastest else 1.0 for kind, flops in best.items()}
    return [{"node": one["node"], "kind": one["kind"], "flops_rel": rounded[one["kind"]]} for one in measured]


def _measured_devices(report: dict[str, Any]) -> list[dict[str, Any]]:
    devices: list[dict[str, Any]] = []
    for node in _working(report):
        seen = node.get("torch") or {}
        gpus, cpu = seen.get("devices") or [], seen.get("cpu")
        for gpu in gpus[: int(node["gpus"]) or None]:
            devices.append({"node": node["ip"], "kind": gpu["kind"], "flops": gpu["flops"], "gpu": True})
        if cpu and not gpus:
            one = {"node": node["ip"], "kind": cpu["kind"], "flops": cpu["flops"], "gpu": False}
            devices += [one] * int(node["cpus"])
    return devices


def links_document(report: dict[str, Any]) -> dict[str, Any]:
    """Returns the document that `raypp plan --links` reads. It has the nodes, the memory that each
    has free for snapshots, the links in each direction, the devices, and the time of the
    measurement. Where `--nccl` tried the GPUs of a node, or of two nodes, its rates count: a
    connection of TCP cannot fill a fast network."""
    links, nccl = [], _nccl_rates(report)
    for link in report["links"]:
        if "error" not in link:
            latency = round(link["latency_ms"], 4)
            over = nccl.pop(frozenset((link["from"], link["to"])), None)
            there, back = (over, over) if over else (round(link["gbps_out"], 4), round(link["gbps_in"], 4))
            links.append({"from": link["from"], "to": link["to"], "gbps": there, "latency_ms": latency})
            links.append({"from": link["to"], "to": link["from"], "gbps": back, "latency_ms": latency})
    links += [
        {"from": (node := next(iter(one))), "to": node, "gbps": rate} for one, rate in nccl.items() if len(one) == 1
    ]
    nodes = [node["ip"] for node in report["nodes"]]
    memory = {node["ip"]: _free_memory(node) for node in _working(report)}
    facts = {"nodes": nodes, "memory": memory, "links": links, "devices": devices(report)}
    return {"measured": report["measured"], **facts}


def _nccl_rates(report: dict[str, Any]) -> dict[frozenset[str], float]:
    """Returns Gbit/s per direction: inside nodes in sums of a GPU, between two of all GPUs."""
    rates = {}
    for group in report.get("groups", ()):
        nodes, best = group["nodes"], group["tries"][-1]
        if group["kind"] == "NCCL" and len(nodes) <= 2 and "error" not in best:
            shared = group["ranks"] // 2 if group["ranks"] % 2 == 0 else 1
            rate = best["all_reduce"] if len(nodes) == 1 else best["exchange"] * shared
            rates[frozenset(nodes)] = round(8 * rate, 4)
    return rates


def _free_memory(node: dict[str, Any]) -> int:
    memory, shared = int(node["memory_free"]), node["shm_free"]
    return memory if shared is None else min(memory, int(shared))


def _some(nodes: list[str]) -> str:
    return ", ".join(nodes) if len(nodes) <= 4 else f"{', '.join(nodes[:3])} and {len(nodes) - 3} more"
