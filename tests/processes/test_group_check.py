"""What `raypp doctor --nccl` runs on the nodes, with gloo on a CPU."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from stand_in_clock import wait_until

from raypp.control import group_test
from raypp.control.recovery.hang_analysis import stuck_collectives
from raypp.errors import RayppError
from raypp.tools.doctor.group_check import _same
from raypp.tools.doctor.node import NodeProbe
from raypp.torch_private import flight_record

HERE = "127.0.0.1"


def tried(probe: NodeProbe, ranks: int, world: int) -> dict[str, object]:
    devices = [(rank, "cpu") for rank in range(ranks)]
    return probe.try_group(devices, world, 1, HERE, probe.free_port(HERE), HERE, "")


def test_two_processes_check_what_they_sum_and_pass_on() -> None:
    rates = tried(NodeProbe("ab" * 32), 2, 2)
    assert sorted(rates) == ["all_reduce", "exchange"] and all(isinstance(rate, float) for rate in rates.values())


def test_numbers_that_change_on_their_way_are_counted() -> None:
    sent = torch.arange(9.0)
    received = sent.clone()
    received[4:7] += 1
    with pytest.raises(RayppError, match="3 of 9 numbers of a message are wrong"):
        _same(received, sent, "a message")


def test_a_group_that_does_not_meet_ends_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_test, "GROUP_TIMEOUT_S", 5.0)
    assert str(tried(NodeProbe("ab" * 32), 1, 2)["error"]) == "hangs: no end within 5 s"


def test_a_device_that_is_not_there_is_reported() -> None:
    probe = NodeProbe("ab" * 32)
    answer = probe.try_group([(0, "cuda:93")], 1, 1, HERE, probe.free_port(HERE), HERE, "P2P")
    assert answer["error"] and answer["peer"] is False


def test_torchs_own_flight_record_is_understood(tmp_path: Path) -> None:
    dist.init_process_group("gloo", f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        dist.all_reduce(torch.ones(3))
        ended = ["by their flight records the ranks have no operation that is not completed"]
        wait_until(lambda: stuck_collectives({0: flight_record()}, {0: "a"}) == ended)  # another thread notes the end
        record = flight_record()
    finally:
        dist.destroy_process_group()
    assert json.loads(record)["entries"][-1]["process_group"] == ["0", "default_pg"]
