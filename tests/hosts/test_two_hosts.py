"""Tests a pipeline whose stages are on different hosts."""

import json

import pytest
from conftest import Office, shards
from laptop import STEPS, Run, assert_same_weights, numbers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def _places(run: Run) -> dict[str, str]:
    return {event.details["label"]: event.node for event in run.events("seated")}


def test_the_pipeline_crosses_hosts_and_fsdp_stays_inside_one(office: Office, one_host: Run) -> None:
    assert len(set(_places(one_host).values())) == 1
    run = office.start(office.two_host_job("two-hosts"), "--json")
    assert run.wait(600) == 0, run.describe()
    answer = json.loads(run.out.splitlines()[-1])
    assert (answer["state"], answer["step"], answer["restarts"]) == ("SUCCEEDED", STEPS, 0)
    places = _places(run)
    assert places["pp0-fsdp0"] == places["pp0-fsdp1"] != places["pp1-fsdp0"] == places["pp1-fsdp1"]
    assert set(places.values()) < {office.bed.network.address(host) for host in range(office.bed.size)}
    assert {"eth0"} == {event.message.rpartition("interface ")[2] for event in run.events("seated")}
    assert numbers(run.history()) == numbers(one_host.history())
    assert_same_weights(shards(run), shards(one_host))
