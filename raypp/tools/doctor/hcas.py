"""What NCCL finds of InfiniBand and RoCE on a node: HCAs, ports, GIDs, locked memory."""

import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

_MAPPED = "0000:0000:0000:0000:0000:ffff:"
_MAY_LOCK = 1 << 14  # CAP_IPC_LOCK
_ENOUGH = 1 << 30


def hcas(root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Returns the ports of this node's HCAs, and how much memory a process may lock. `root`: of the
    file system with /sys and /proc. `environment`: with NCCL's settings. Returns `ports`: `name`,
    `port`, `state`, `layer` (InfiniBand or Ethernet), `rate`, `interface` ("" if it has none),
    `gid` (the index that NCCL takes; None: none fits), `taken` (by NCCL). And `memlock` in bytes;
    None: no limit."""
    ports = []
    for port in sorted(root.glob("sys/class/infiniband/*/ports/*")):
        name, state, layer = port.parts[-3], _read(port / "state").partition(": ")[2], _read(port / "link_layer")
        gid = _gid(port, layer, environment.get("NCCL_IB_GID_INDEX", ""))
        own = (one.name for one in (port.parents[1] / "device" / "net").glob("*"))
        interface = _read(port / f"gid_attrs/ndevs/{gid or 0}") or next(own, "")
        facts = {"name": name, "port": int(port.name), "state": state, "layer": layer, "rate": _read(port / "rate")}
        taken = state == "ACTIVE" and _allowed(name, port.name, environment)
        ports.append({**facts, "interface": interface, "gid": gid, "taken": taken})
    effective = re.search(r"^CapEff:\s*([0-9a-f]+)", _read(root / "proc/self/status"), re.M)
    limit = re.search(r"^Max locked memory\s+(\d+)", _read(root / "proc/self/limits"), re.M)
    free = limit is None or (effective is not None and int(effective[1], 16) & _MAY_LOCK)
    return {"ports": ports, "memlock": None if free or limit is None else int(limit[1])}


def _allowed(name: str, port: str, settings: Mapping[str, str]) -> bool:
    """Whether NCCL's settings allow a port. NCCL_IB_HCA lists prefixes; `=`: names, `^`: others."""
    if settings.get("NCCL_IB_DISABLE", "0") != "0" or settings.get("NCCL_NET", "IB").lower() == "socket":
        return False
    others, exact, names = re.match(r"(\^?)(=?)(.*)", settings.get("NCCL_IB_HCA", "")).groups()  # type: ignore[union-attr]
    listed = [entry.partition(":") for entry in names.split(",") if entry]
    found = any(
        (name == first if exact else name.startswith(first)) and which in ("", port) for first, _, which in listed
    )
    return not listed or found != bool(others)


def _gid(place: Path, layer: str, asked: str) -> int | None:
    """Returns the GID that NCCL takes: as set, else 0; with RoCE v2's with an IPv4 address."""
    if asked.isdecimal():
        return int(asked) if set(_read(place / "gids" / asked)) - set("0:") else None
    if layer != "Ethernet":
        return 0
    known = sorted(int(gid.name) for gid in place.glob("gids/*") if _read(gid).startswith(_MAPPED))
    return next((index for index in known if _read(place / f"gid_attrs/types/{index}") == "RoCE v2"), None)


def _read(path: Path) -> str:
    with contextlib.suppress(OSError):  # the type of a GID that is not set cannot be read
        return path.read_text().strip()
    return ""


def hca_problems(
    nodes: Sequence[dict[str, Any]], links: Sequence[dict[str, Any]]
) -> Iterator[tuple[Literal["breaks", "slows", "note"], str, str]]:
    """Yields how severe a problem of a node with GPUs is, what is wrong, and the fix. `nodes`: with
    `hcas` in `infiniband`. `links`: as measured, each with its first node's interface."""
    nodes = [node for node in nodes if node.get("infiniband", {}).get("ports")]
    every = [port for node in nodes for port in node["infiniband"]["ports"]]
    active = {(port["name"], port["port"]) for port in every if port["state"] == "ACTIVE"}
    for node in nodes:
        ip, ports, memlock = node["ip"], node["infiniband"]["ports"], node["infiniband"]["memlock"]
        taken = [port for port in ports if port["taken"]]
        for port in (port for port in ports if port["state"] != "ACTIVE"):
            elsewhere = (port["name"], port["port"]) in active
            fault = f"{_hca(port)} of {ip} is {port['state'] or 'unknown'}, so NCCL does without it"
            fault += "; on other nodes it is ACTIVE" if elsewhere else "" if taken else ", over plain TCP"
            fix = "check cable, switch port and subnet manager (`ibstat`, `ip link`)"
            yield "slows" if elsewhere or not taken else "note", fault, fix
        if taken and memlock is not None and memlock < _ENOUGH:
            fault = f"Ray's processes on {ip} may lock {memlock >> 10:,} KiB of memory; NCCL registers more with an HCA"
            fix = "start Ray there after `ulimit -l unlimited` (containers: --ulimit memlock=-1; systemd: LimitMEMLOCK)"
            yield "breaks", fault, fix
        for port in (port for port in taken if port["gid"] is None):
            fault = f"{_hca(port)} of {ip} has no GID for NCCL: none of RoCE v2 with IPv4, or not the one set"
            fix = f"give {port['interface'] or 'its interface'} an IPv4 address, or set NCCL_IB_GID_INDEX (`show_gids`)"
            yield "breaks", fault, fix
        routes = {link["interface"] for link in links if link["from"] == ip and link.get("interface")}
        if any(link["to"] == ip for link in links):
            routes |= {one["name"] for one in node["interfaces"] if one["address"] == ip}
        if taken and routes and not routes & {port["interface"] for port in taken}:
            left = next((f", which is {_hca(port)}" for port in ports if port["interface"] in routes), "")
            fault = f"NCCL on {ip} takes {', '.join(map(_hca, taken))}; the route to the other nodes is over "
            fix = "right if both networks join all nodes; else set NCCL_IB_HCA in resources.env"
            yield "slows" if left else "note", f"{fault}{', '.join(sorted(routes))}{left}", fix


def _hca(port: dict[str, Any]) -> str:
    return f"{port['name']}:{port['port']}" + (f" ({port['interface']})" if port["interface"] else "")
