"""What `raypp doctor` finds of InfiniBand and RoCE, in copies of /sys and /proc."""

from pathlib import Path
from typing import Any

import pytest
from test_doctor import _node, _report

from raypp.tools.doctor.findings import findings, links_document
from raypp.tools.doctor.hcas import hcas

V4 = "0000:0000:0000:0000:0000:ffff:0a00:0001"
NONE = "0000:0000:0000:0000:0000:0000:0000:0000"
LIMITS = "Max open files        1024        4096        files\nMax locked memory     {}   {}   bytes\n"


def add_hca(
    root: Path, name: str, state: str = "4: ACTIVE", layer: str = "Ethernet", net: str = "eth2", gid: str = V4
) -> None:
    port = root / "sys/class/infiniband" / name / "ports/1"
    files = {"state": state, "link_layer": layer, "rate": "400 Gb/sec (4X NDR)", "gids/0": "fe80::1", "gids/3": gid}
    files |= {"gid_attrs/types/0": "IB/RoCE v1", "gid_attrs/types/3": "RoCE v2"}
    for path, content in files.items():
        (port / path).parent.mkdir(parents=True, exist_ok=True)
        (port / path).write_text(f"{content}\n")
    (port.parents[1] / "device/net" / net).mkdir(parents=True)
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    (root / "proc/self/limits").write_text(LIMITS.format(65536, 65536))
    (root / "proc/self/status").write_text("CapEff:\t0000000000000000\n")


def taken(root: Path, **settings: str) -> list[str]:
    return [port["name"] for port in hcas(root, settings)["ports"] if port["taken"]]


def test_each_port_is_reported_with_its_state_gid_and_interface(tmp_path: Path) -> None:
    add_hca(tmp_path, "mlx5_0")
    add_hca(tmp_path, "mlx5_1", "1: DOWN", "InfiniBand", "ib1")
    first, second = hcas(tmp_path, {})["ports"]
    assert first == {
        "name": "mlx5_0", "port": 1, "state": "ACTIVE", "layer": "Ethernet", "rate": "400 Gb/sec (4X NDR)",
        "interface": "eth2", "gid": 3, "taken": True,
    }  # fmt: skip
    assert (second["state"], second["gid"], second["interface"], second["taken"]) == ("DOWN", 0, "ib1", False)
    assert hcas(tmp_path / "nothing", {}) == {"ports": [], "memlock": None}


@pytest.mark.parametrize(
    ("setting", "names"),
    [
        ("mlx5_1", ["mlx5_1", "mlx5_10"]),
        ("=mlx5_1", ["mlx5_1"]),
        ("=mlx5_0:1,mlx5_10:2", ["mlx5_0"]),
        ("^mlx5_1", ["mlx5_0"]),
        ("^=mlx5_1", ["mlx5_0", "mlx5_10"]),
    ],
)
def test_nccl_takes_the_hcas_that_its_setting_allows(tmp_path: Path, setting: str, names: list[str]) -> None:
    for name in ("mlx5_0", "mlx5_1", "mlx5_10"):
        add_hca(tmp_path, name)
    assert taken(tmp_path, NCCL_IB_HCA=setting) == names
    assert taken(tmp_path, NCCL_IB_DISABLE="1") == taken(tmp_path, NCCL_NET="Socket") == []


def found(first: Path, second: Path, **settings: str) -> dict[str, str]:
    """Returns the findings' severities by text, of two nodes with GPUs that have these HCAs."""
    nodes = [
        _node(ip, gpus=1, torch={"devices": [{"kind": "h100", "flops": 1e14}]}, infiniband=hcas(root, settings))
        for ip, root in (("10.0.0.1", first), ("10.0.0.2", second))
    ]
    return {one.problem.fault: str(one.severity) for one in findings({**_report(), "nodes": nodes})}


def test_what_is_wrong_with_an_hca_is_named(tmp_path: Path) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    for name in ("mlx5_0", "mlx5_1"):
        add_hca(good, name, net="eth0")
    (good / "proc/self/limits").write_text(LIMITS.format("unlimited", "unlimited"))
    assert found(good, good) == {}
    add_hca(bad, "mlx5_0", "1: DOWN", net="eth0")
    add_hca(bad, "mlx5_1", net="eth5", gid=NONE)
    assert found(good, bad) == {
        "mlx5_0:1 (eth0) of 10.0.0.2 is DOWN, so NCCL does without it; on other nodes it is ACTIVE": "slows",
        "Ray's processes on 10.0.0.2 may lock 64 KiB of memory; NCCL registers more with an HCA": "breaks",
        "mlx5_1:1 (eth5) of 10.0.0.2 has no GID for NCCL: none of RoCE v2 with IPv4, or not the one set": "breaks",
        "NCCL on 10.0.0.2 takes mlx5_1:1 (eth5); the route to the other nodes is over eth0, which is mlx5_0:1 (eth0)": (
            "slows"
        ),
    }  # fmt: skip
    assert any("over plain TCP" in fault for fault in found(bad, bad, NCCL_IB_HCA="mlx5_0"))
    assert any("not the one set" in fault for fault in found(good, good, NCCL_IB_GID_INDEX="7"))


def test_rates_of_nccl_stand_for_tcp_in_links_json_also_between_nodes() -> None:
    def group(nodes: list[str], ranks: int, **rates: Any) -> dict[str, Any]:
        return {"nodes": nodes, "kind": "NCCL", "ranks": ranks, "tries": [{"off": "", **rates}]}

    one, two = "10.0.0.1", "10.0.0.2"
    rates = {"all_reduce": 300.0, "exchange": 40.0}
    fails = group([two], 8, error="hangs")
    report = {**_report(), "groups": [group([one], 8, **rates), fails, group([one, two], 16, **rates)]}
    links = {(link["from"], link["to"]): link for link in links_document(report)["links"]}
    assert {pair: link["gbps"] for pair, link in links.items()} == {
        (one, two): 2560,
        (two, one): 2560,
        (one, one): 2400,
    }
    assert links[one, two]["latency_ms"] == 0.2
    report["groups"][2] |= {"kind": "gloo"}
    assert links_document(report)["links"][0]["gbps"] == 0.94
