"""`raypp doctor` on several hosts measures every link and names what is broken."""

import json
from collections.abc import Iterator
from itertools import permutations

import pytest
from conftest import Office

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def slowed(office: Office) -> Iterator[Office]:
    office.bed.set_rate(1, "100mbit")
    yield office
    office.bed.set_rate(1, "1gbit")


def test_every_link_is_measured_and_the_slow_one_is_reported(slowed: Office) -> None:
    office = slowed
    out = office.directory / "links.json"
    job = office.two_host_job("examined")
    answer = office.raypp("doctor", str(job), "--json", "--no-devices", "--out", str(out), timeout=300)
    assert answer.code == 0, answer
    report = answer.json()
    addresses = [office.bed.network.address(host) for host in range(office.bed.size)]
    assert sorted(node["ip"] for node in report["nodes"]) == addresses
    links = {(link["from"], link["to"]): link["gbps"] for link in json.loads(out.read_text())["links"]}
    assert links.keys() == set(permutations(addresses, 2)) and all(links.values())
    assert all("error" not in node and not node["hidden_from_it"] for node in report["store"]["nodes"])
    slow = [one["what"] for one in report["findings"] if "interface eth0 has 10" in one["what"]]
    assert any(addresses[1] in what for what in slow), report["findings"]


def test_what_breaks_a_run_is_reported_and_is_the_exit_code(office: Office) -> None:
    job = office.two_host_job("too-large", mesh__fsdp=8, checkpoint__url="s3://nobody/here")
    answer = office.raypp("doctor", str(job), "--json", "--no-devices", timeout=300)
    assert answer.code == 1, answer
    said = [one["what"] for one in answer.json()["findings"] if one["severity"] == "breaks"]
    assert any("ranks need" in what for what in said), said
    assert any("the bucket 'nobody' does not exist" in what for what in said), said


def test_without_a_cluster_the_exit_code_is_3(office: Office) -> None:
    answer = office.raypp("doctor", "--address", f"http://{office.bed.network.switch}:1", "--no-devices")
    assert (answer.code, "no Ray cluster answers" in answer.err) == (3, True), answer


def test_a_pair_that_does_not_reach_each_other_is_named(office: Office) -> None:
    """Hosts 1 and 2 reach the head but not each other, because each has a wrong neighbour entry."""
    network = office.bed.network
    there = f"ip neigh replace {network.address(2)} lladdr 02:00:00:00:00:01 nud permanent dev eth0"
    assert office.bed.run(1, there.split()).returncode == 0
    try:
        answer = office.raypp("doctor", "--json", "--no-devices", timeout=300)
    finally:
        office.bed.run(1, ["ip", "neigh", "del", network.address(2), "dev", "eth0"])
    assert answer.code == 1, answer
    (said,) = [one["what"] for one in answer.json()["findings"] if one["severity"] == "breaks"]
    reason = "no answer, and no refusal: packets vanish"
    assert said == f"{network.address(1)} cannot reach {network.address(2)} over eth0: {reason}"
