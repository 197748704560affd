"""What `raypp doctor --nccl` runs on the nodes, with gloo on a CPU."""

from __future__ import annotations

import pytest

from raypp.doctor import node as node_module
from raypp.doctor.node import NodeProbe

HERE = "127.0.0.1"


def tried(probe: NodeProbe, ranks: int, world: int) -> dict[str, object]:
    devices = [(rank, "cpu") for rank in range(ranks)]
    return probe.try_group(devices, world, HERE, probe.free_port(HERE), HERE, "")


def test_two_processes_check_what_they_sum_and_pass_on() -> None:
    rates = tried(NodeProbe("ab" * 32), 2, 2)
    assert sorted(rates) == ["all_reduce", "exchange"] and all(isinstance(rate, float) for rate in rates.values())


def test_a_group_that_does_not_meet_ends_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_module, "GROUP_TIMEOUT_S", 5.0)
    assert str(tried(NodeProbe("ab" * 32), 1, 2)["error"]) == "hangs: no end within 5 s"


def test_a_device_that_is_not_there_is_told() -> None:
    probe = NodeProbe("ab" * 32)
    answer = probe.try_group([(0, "cuda:93")], 1, HERE, probe.free_port(HERE), HERE, "P2P")
    assert answer["error"] and answer["peer"] is False
