"""The findings of `raypp doctor`, and its measurements over loopback."""

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from raypp.control.group_test import slowest
from raypp.job.job import Job
from raypp.tools.doctor.driver import MANY_NODES, rounds
from raypp.tools.doctor.findings import Severity, findings, links_document
from raypp.tools.doctor.node import NodeProbe
from raypp.untrusted.files import open_to_others

_PACKAGES = dict.fromkeys(("boto3", "safetensors", "pydantic"), "1.0") | {"torch": "2.13.0", "ray": "2.60.0"}


def _node(ip: str, **changes: Any) -> dict[str, Any]:
    return {
        "ip": ip,
        "hostname": ip,
        "python": "3.11.7",
        "packages": dict(_PACKAGES),
        "cpus": 2,
        "gpus": 0,
        "memory_free": 8 << 30,
        "shm_free": 4 << 30,
        "disk_free": 50 << 30,
        "interfaces": [{"name": "eth0", "address": ip, "mbps": 1000, "up": True}],
        "lookup_s": 0.001,
        "torch": {"torch": "2.13.0", "cuda": None, "nccl": None, "devices": [], "cpu": {"kind": "x", "flops": 1e10}},
    } | changes


def _report() -> dict[str, Any]:
    link = {
        "from": "10.0.0.1", "to": "10.0.0.2", "interface": "eth0", "gbps_out": 0.94, "gbps_in": 0.93, "latency_ms": 0.2,
        "skew_s": 0.001,
    }  # fmt: skip
    nodes = [_node("10.0.0.1"), _node("10.0.0.2")]
    return {"measured": "now", "nodes": nodes, "links": [link], "store": None}


def test_nothing_is_found_on_two_equal_nodes_with_a_good_link() -> None:
    assert findings(_report()) == []


def test_a_folder_of_ray_that_others_may_write_is_found_with_what_to_type() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as place:
        folder = Path(place) / "r" / "session"
        folder.mkdir(parents=True)
        folder.parent.chmod(0o777)
        assert open_to_others(folder) is None, "its parent is private"
        Path(place).chmod(0o711)
        assert open_to_others(folder) == folder.parent
        folder.parent.chmod(0o1777)
        assert open_to_others(folder) is None, "in a folder with the sticky bit nobody replaces others' files"
        if os.geteuid() == 0:
            os.chown(folder, 65534, 65534)
            assert open_to_others(folder) == folder
    report = _report()
    report["nodes"][1]["open_folder"] = "/tmp/ray"
    (finding,) = findings(report)
    assert finding.severity is Severity.EXPOSES and "10.0.0.2" in finding.problem.fault
    assert "/tmp/ray" in finding.problem.fault and "ray start --temp-dir=$(mktemp -d" in finding.problem.fix


def test_of_a_groups_answers_the_cause_is_reported_or_the_lowest_rates() -> None:
    assert slowest([{"all_reduce": 9.0, "exchange": 8.0}, {"all_reduce": 7.0, "exchange": 8.5}]) == {
        "all_reduce": 7.0,
        "exchange": 8.0,
    }
    lost, own = {"error": "lost", "peer": True}, {"error": "full", "fix": "--shm-size", "peer": False}
    assert slowest([_FASTER, lost, own]) == own


def _lopsided(report: dict[str, Any]) -> None:
    report["links"][0]["gbps_in"] = 0.1


def _skewed(report: dict[str, Any]) -> None:
    report["links"][0]["skew_s"] = -900.0


def _each(report: dict[str, Any], key: str, *values: Any) -> None:
    """Gives each node a GPU that differs in what torch says of it."""
    for node, value in zip(report["nodes"], values, strict=True):
        node["gpus"] = 1
        node["torch"] |= {"devices": [{"kind": "H", "flops": 7e14, "capability": [9, 0]}]}
        (node["torch"] if key == "driver" else node["torch"]["devices"][0])[key] = value


def _with_card(node: dict[str, Any], count: int = 1, **facts: Any) -> None:
    card = {"kind": "x", "flops": 1e10, "bus": "0:41:0", "supported": True, "time_limit": False}
    node["gpus"] = count
    node["torch"]["devices"] = [card | facts] * count


_FASTER = {"all_reduce": 9.0, "exchange": 8.0}


def _tried(report: dict[str, Any], *tries: dict[str, Any]) -> None:
    report["groups"] = [{"nodes": ["10.0.0.1", "10.0.0.2"], "kind": "NCCL", "ranks": 4, "tries": list(tries)}]


_LOST = {"from": "10.0.0.1", "to": "10.0.0.2", "interface": "eth0", "error": "no answer"}
_STORE = {"up_mbps": 1, "down_mbps": 1, "hidden_from_it": []}
_HANGS = {"off": "", "error": "hangs"}
_BREAKS: list[tuple[Callable[[dict[str, Any], dict[str, Any]], object], str]] = [
    (
        lambda report, node: node["packages"].update(torch="2.14.0"),
        "different versions of torch: 2.13.0 on 10.0.0.1, 2.14.0 on 10.0.0.2",
    ),
    (
        lambda report, node: [one["packages"].update(ray="2.9.3") for one in report["nodes"]],
        "10.0.0.1, 10.0.0.2 have ray 2.9.3 (raypp needs 2.50 or newer)",
    ),
    (
        lambda report, node: node.update(python="3.12.1"),
        "different versions of python: 3.11 on 10.0.0.1, 3.12 on 10.0.0.2",
    ),
    (lambda report, node: report.update(links=[_LOST]), "10.0.0.1 cannot reach 10.0.0.2 over eth0: no answer"),
    (lambda report, node: report.update(links=[_LOST | {"lost": True}]), "no refusal: packets vanish"),
    (lambda report, node: report.update(links=[_LOST | {"lost": True, "latency_ms": 0.2}]), "the same MTU"),
    (lambda report, node: _skewed(report), "clocks of 10.0.0.1 and 10.0.0.2 differ by 900.0 s"),
    (lambda report, node: node.update(error="no answer within 60 s"), "no worker answers on node 10.0.0.2"),
    (
        lambda report, node: report.update(store={"url": "/runs", "nodes": [
            {"ip": "10.0.0.1", **_STORE}, {"ip": "10.0.0.2", **_STORE, "hidden_from_it": ["10.0.0.1"]}]}),
        "10.0.0.2 does not see in /runs what 10.0.0.1 wrote there",
    ),
    (
        lambda report, node: report.update(
            store={"url": "s3://b", "nodes": [{"ip": "10.0.0.2", "error": "403", "fix": "other keys"}]}),
        "the store s3://b from 10.0.0.2: 403",
    ),
    (
        lambda report, node: node.update(data=[["data.parts[2].path", "no file at /data/text.txt", "use another"]]),
        "on 10.0.0.2: no file at /data/text.txt",
    ),
    (lambda report, node: node.update(gpus=1), "Ray counts more GPUs than torch sees on 10.0.0.2"),
    (
        lambda report, node: (node.update(gpus=1), node["torch"].update(visible="")),
        "torch sees on 10.0.0.2 (CUDA_VISIBLE_DEVICES is '' on 10.0.0.2)",
    ),
    (
        lambda report, node: _tried(
            report, {"off": "", "error": "3 of 9 numbers are wrong"}, {"off": "P2P", **_FASTER}),
        "NCCL between the 4 ranks on 10.0.0.1, 10.0.0.2 works only with NCCL_P2P_DISABLE=1",
    ),
    (
        lambda report, node: _tried(
            report, _HANGS, {"off": "P2P", "error": "no interface", "fix": "NCCL_SOCKET_IFNAME"},
            {**_HANGS, "off": "SHM"}, {**_HANGS, "off": "IB"}),
        "on 10.0.0.1, 10.0.0.2 does not work: no interface",
    ),
    (
        lambda report, node: _with_card(node, time_limit=True),
        "the driver of 10.0.0.2 ends kernels that run for seconds on x",
    ),
    (lambda report, node: _with_card(node, supported=False), "torch on 10.0.0.2 has no kernels for x"),
    (
        lambda report, node: (_with_card(node, 2, bus=None), node.update(shm_free=64 << 20)),
        "less than 1 GiB of /dev/shm is free on 10.0.0.2, where NCCL",
    ),
]  # fmt: skip
_FAST = {"name": "eth1", "address": "10.1.0.2", "mbps": 10000, "up": True, "physical": True}
_OTHERS: list[tuple[Callable[[dict[str, Any], dict[str, Any]], object], Severity, str]] = [
    (
        lambda report, node: _lopsided(report), Severity.SLOWS,
        "the link 10.0.0.1 – 10.0.0.2 is asymmetric: 0.94 Gbit/s one way, 0.1 back",
    ),
    (
        lambda report, node: report["links"][0].update(gbps_in=0.09, gbps_out=0.09), Severity.SLOWS,
        "carries 0.09 Gbit/s; its interface eth0 has 1",
    ),
    (
        lambda report, node: node["interfaces"].append(_FAST), Severity.SLOWS,
        "node 10.0.0.2 uses eth0 (1 Gbit/s), but also has eth1 with 10",
    ),
    (
        lambda report, node: _each(report, "flops", 7e14, 4e14), Severity.SLOWS,
        "a H on 10.0.0.2 reaches less than 70 % of the speed of the fastest H",
    ),
    (
        lambda report, node: _with_card(node, 2), Severity.SLOWS,
        "node 10.0.0.2 has parts of one card (MIG) as several devices",
    ),
    (
        lambda report, node: node.update(shm_free=64 << 20), Severity.SLOWS,
        "less than 1 GiB of /dev/shm is free on 10.0.0.2",
    ),
    (
        lambda report, node: (_with_card(node), node.update(compiler=None)), Severity.SLOWS,
        "10.0.0.2 has no C compiler: train.compile is refused there",
    ),
    (
        lambda report, node: _each(report, "capability", [7, 5], [7, 5]), Severity.NOTE,
        "H (7.5) on 10.0.0.1, 10.0.0.2 is too old for bf16",
    ),
    (
        lambda report, node: _each(report, "driver", "550.54", "570.1"), Severity.NOTE,
        "different GPU drivers: 550.54 on 10.0.0.1, 570.1 on 10.0.0.2",
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("harm", "severity", "shown"), [*((harm, Severity.BREAKS, text) for harm, text in _BREAKS), *_OTHERS]
)
def test_each_harm_is_found_by_itself_named_and_has_a_fix(harm: Any, severity: Severity, shown: str) -> None:
    report = _report()
    harm(report, report["nodes"][1])
    (found,) = findings(deepcopy(report))
    assert found.severity is severity
    assert shown in str(found.problem)
    assert found.problem.fault and found.problem.fix


@pytest.mark.parametrize(
    "unusable",
    [
        {"name": "veth7", "address": "10.1.0.1", "physical": False},
        {"name": "docker0", "address": "172.17.0.1", "physical": False},
        {"name": "eth1", "address": "fe80::1", "physical": True},
        {"name": "eth1", "address": "169.254.3.4", "physical": True},
    ],
    ids=lambda interface: interface["address"],
)
def test_an_interface_that_leads_to_no_other_node_is_not_proposed(unusable: dict[str, Any]) -> None:
    report = _report()
    report["nodes"][0]["interfaces"].append({"mbps": 10000, "up": True, **unusable})
    assert findings(report) == []


def test_a_node_reports_which_of_its_interfaces_are_hardware(late: NodeProbe) -> None:
    known = {one["name"]: one["physical"] for one in late.facts("127.0.0.1")["interfaces"]}
    assert known["lo"] is False


def test_the_worst_is_reported_first() -> None:
    report = _report()
    _lopsided(report)
    _skewed(report)
    assert [found.severity for found in findings(report)] == [Severity.BREAKS, Severity.SLOWS]


def test_links_for_planning_have_both_directions_and_every_device() -> None:
    report = _report()
    report["nodes"][1]["torch"]["cpu"] = {"kind": "y", "flops": 2e10}
    document = links_document(report)
    assert document["nodes"] == ["10.0.0.1", "10.0.0.2"]
    assert [(one["from"], one["to"], one["gbps"]) for one in document["links"]] == [
        ("10.0.0.1", "10.0.0.2", 0.94),
        ("10.0.0.2", "10.0.0.1", 0.93),
    ]
    speeds = [(one["node"], one["flops_rel"]) for one in document["devices"]]
    assert speeds == [("10.0.0.1", 0.5)] * 2 + [("10.0.0.2", 1.0)] * 2


@pytest.mark.parametrize("count", [1, 2, 5, MANY_NODES, MANY_NODES + 1, 40])
def test_every_pair_is_measured_once_and_no_node_twice_at_a_time(count: int) -> None:
    all_rounds = rounds(count)
    pairs = [pair for one in all_rounds for pair in one]
    assert sorted(pairs) == [(one, other) for one in range(count) for other in range(one + 1, count)]
    for one in all_rounds:
        assert len({node for pair in one for node in pair}) == 2 * len(one)
        assert count > MANY_NODES or len(one) == 1


@pytest.fixture
def token() -> str:
    return "ab" * 32


@pytest.fixture
def late(token: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NodeProbe]:
    monkeypatch.chdir(tmp_path)
    probe = NodeProbe(token, clock=lambda: time.time() + 7)
    yield probe
    probe.close()


def test_rate_latency_and_skew_of_a_link_are_measured(token: str, late: NodeProbe) -> None:
    port = late.listen("127.0.0.1")
    found = NodeProbe(token).measure("127.0.0.1", port, 0.1)
    assert "error" not in found
    assert found["skew_s"] == pytest.approx(7, abs=0.2)
    assert found["gbps_out"] > 0.1 < found["gbps_in"]
    assert 0 < found["latency_ms"] < 100


def test_a_stranger_gets_nothing(late: NodeProbe) -> None:
    port = late.listen("127.0.0.1")
    found = NodeProbe("cd" * 32).measure("127.0.0.1", port, 0.1)
    assert found["error"]
    assert not {"latency_ms", "gbps_out", "gbps_in"} & found.keys()


def test_a_node_that_does_not_listen_is_an_error_not_an_exception(token: str, late: NodeProbe) -> None:
    port = late.listen("127.0.0.1")
    late.close()
    assert NodeProbe(token).measure("127.0.0.1", port, 0.1)["error"]


def test_a_store_is_tried_with_everything_and_left_as_it_was(late: NodeProbe, tmp_path: Path) -> None:
    url = str(tmp_path / "runs")
    answer = late.try_store(url, ".raypp-doctor-x/0")
    assert answer["up_mbps"] > 0 < answer["down_mbps"]
    assert late.sees(url, [".raypp-doctor-x/0", ".raypp-doctor-x/1"]) == [".raypp-doctor-x/0"]
    late.forget(url, ".raypp-doctor-x/0")
    assert not [path for path in Path(url).rglob("*") if path.is_file()]


def test_every_part_of_a_mixture_is_examined_on_the_node(late: NodeProbe, tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("here")
    (tmp_path / "chat.jsonl").write_text('{"prompt": 3, "completion": "so"}')
    sources = [("text", "one.txt"), ("text", "*.txt"), ("text", "two.txt"), ("chat", "chat.jsonl"), ("text", "*.md")]
    parts: list[dict[str, Any]] = [{"kind": kind, "path": str(tmp_path / name)} for kind, name in sources]
    job: dict[str, Any] = {"name": "mixed", "data": {"kind": "mixture", "parts": [*parts, {"kind": "own.module:read"}]}}
    found = late.data_problems(Job.model_validate(job).model_dump(mode="json"))
    assert [key for key, _, _ in found] == ["data.parts[2].path", "data.parts[4].path"]
    assert f"no file at {tmp_path}/two.txt on this node" in found[0][1]
    del parts[4], parts[2]
    job["data"]["parts"] = parts
    assert [key for key, _, _ in late.data_problems(job)] == ["data.parts[2].path"]
    job["data"]["tokenizer"] = str(tmp_path / "tokenizer.json")
    assert "tokenizer.json" in late.data_problems(job)[0][1]


@pytest.mark.parametrize("speeds", [(7e14, 0.0), (0.0, 0.0)])
def test_a_gpu_without_free_memory_counts_like_the_others_of_its_kind(speeds: tuple[float, float]) -> None:
    report = _report()
    for node, flops in zip(report["nodes"], speeds, strict=True):
        node["gpus"], node["torch"]["devices"] = 1, [{"kind": "H", "flops": flops}]
    assert [one["flops_rel"] for one in links_document(report)["devices"]] == [1.0, 1.0]
