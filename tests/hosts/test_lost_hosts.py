"""A host dies, is cut off, or freezes, while another host is free."""

import json
from collections.abc import Callable, Iterator

import pytest
from conftest import Office, shards
from laptop import EVERY, STEPS, Run, assert_same_weights, numbers, wait_for

from cluster.testbed import TestBed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

HARM: dict[str, Callable[[TestBed, int], object]] = {
    "killed": lambda bed, host: bed.kill(host),
    "without power": lambda bed, host: bed.kill(host, silently=True),
    "cut off": lambda bed, host: bed.cut(host),
    "frozen": lambda bed, host: bed.freeze(host),
}


@pytest.fixture
def repaired(office: Office) -> Iterator[Office]:
    yield office
    office.repair()


@pytest.mark.parametrize("harm", HARM)
def test_a_run_goes_on_without_a_lost_host_as_if_nothing_had_been(repaired: Office, one_host: Run, harm: str) -> None:
    office = repaired
    job = office.two_host_job(f"host-{harm.replace(' ', '-')}", recovery__hang_timeout_s=20)
    run = office.start(job, "--json")
    run.wait_step(EVERY + 2)
    lost = _victim(office, run)
    HARM[harm](office.bed, lost)
    assert run.wait(600) == 0, run.describe()
    answer = json.loads(run.out.splitlines()[-1])
    assert (answer["state"], answer["step"]) == ("SUCCEEDED", STEPS)
    assert answer["restarts"] >= 1
    address = office.bed.network.address(lost)
    last = max(event.attempt for event in run.events("seated"))
    assert address not in {event.node for event in run.events("seated") if event.attempt == last}
    assert address in {event.node for event in run.events("rank_failed")}, run.describe()
    assert not run.events("controller_restarted"), "the controller was not on the head"
    assert numbers(run.history()) == numbers(one_host.history())
    assert_same_weights(shards(run), shards(one_host))
    # Processes of a host that returns do no harm, and exit.
    office.bed.heal(lost)
    office.bed.thaw(lost)
    assert wait_for(lambda: not office.workers(f"{run.name}/"), "the end of the lost host's ranks", 60)


def _victim(office: Office, run: Run) -> int:
    """Returns the host of the last stage, not the head's: no run survives that one's loss."""
    address = next(event.node for event in run.events("seated") if event.details["label"] == "pp1-fsdp0")
    host = next(host for host in range(office.bed.size) if office.bed.network.address(host) == address)
    assert host != 0
    return host
