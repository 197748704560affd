"""Which ranks share a card, by nodes and by measured messages."""

from dataclasses import replace

import pytest
from planned_jobs import job_with

from raypp.job.job import Job
from raypp.planning.choose_lookahead import cards_and_links, cards_of_nodes
from raypp.planning.costs import Costs, Part
from raypp.planning.forecast import forecast
from raypp.planning.machines import Link, Machines, Node, message_bytes
from raypp.planning.schedules.one_f_one_b import build as build_1f1b
from raypp.planning.schedules.simulate import StageTimes, simulate

UNIT = Costs(Part(1.0, 2.0), Part(0.0, 0.0), Part(0.0, 0.0))
FOUR = [0, 1, 2, 3]
HOSTS = tuple(Node(name, 1) for name in "abcd")


def on_four(microbatches: int, lookahead: int | str) -> Job:
    pipeline = {"microbatches": microbatches, "layers_per_stage": [1, 1, 1, 1], "lookahead": lookahead}
    return job_with(model={"num_layers": 4}, mesh={"pp": 4}, pipeline=pipeline)


def test_a_host_between_two_others_shares_its_card_and_the_ends_have_one_neighbour() -> None:
    cards, links = cards_and_links(FOUR, FOUR, [1.0] * 4, [2.0] * 4)
    assert (cards, links) == ([None, 1, 2, None], [1.0] * 3)


def test_a_queue_is_not_taken_for_the_wire() -> None:
    """As measured on four hosts: 42 ms alone, 97 ms among others."""
    cards, links = cards_and_links(FOUR, FOUR, [0.042] * 4, [0.097] * 4)
    assert cards == [None, 1, 2, None]
    assert links == pytest.approx([0.0485] * 3), "two messages together need 97 ms of the card"


def test_unequal_shares_of_a_card_are_shares_of_it() -> None:
    """As measured on four hosts at 43 Mbit/s, with one unlucky channel each way."""
    wire, crowded = [0.101, 0.115, 0.101, 0.0], [0.21, 0.19, 0.13, 0.0]
    cards, links = cards_and_links(FOUR, FOUR, wire, crowded)
    assert cards == [None, 1, 2, None]
    assert links == pytest.approx([wire[0], wire[1], wire[2]]), "0.21 s for two messages is what their wires need"


def test_hosts_with_a_card_for_each_neighbour_share_none() -> None:
    assert cards_and_links(FOUR, FOUR, [1.0] * 4, [1.1] * 4) == (None, [1.0] * 3)


def test_a_short_message_to_one_side_changes_nothing_for_a_long_one_to_the_other() -> None:
    cards, links = cards_and_links(FOUR, FOUR, [0.01, 1.0, 0.01, 0], [0.01, 1.0, 0.01, 0])
    assert cards == [None, 1, 2, None] and links == [0.01, 1.0, 0.01]
    program = build_1f1b(4, 1, 16, 2)
    times = StageTimes.equal(4, link=links)
    assert simulate(program, replace(times, cards=cards)).makespan < 1.01 * simulate(program, times).makespan


def test_ranks_of_one_host_share_its_card_for_messages_to_others() -> None:
    # Stages of a loop: ranks 0 and 1 on one host, 2 and 3 on the other. 1 → 2 and 3 → 0 cross.
    stages, nodes = [0, 1, 2, 3, 0, 1, 2, 3], [0, 0, 1, 1]
    wire, crowded = [0.1, 1.0, 0.1, 1.0, 0.1, 1.0, 0.1, 0.0], [0.2, 2.0, 0.2, 2.0, 0.2, 2.0, 0.2, 0.0]
    cards, links = cards_and_links(stages, nodes, wire, crowded)
    assert cards == [0, 0, 1, 1]
    assert links == pytest.approx(wire[:-1])


def test_nodes_share_cards_only_where_several_channels_leave_one() -> None:
    assert cards_of_nodes([0, 1], [0, 1]) is None
    assert cards_of_nodes(FOUR, [0, 0, 1, 1]) is None
    assert cards_of_nodes(FOUR, FOUR) == FOUR
    assert cards_of_nodes([0, 1, 2], [0, 1, 0]) == [0, 1, 0]


def test_a_forecast_on_four_hosts_shares_each_hosts_card() -> None:
    """The same times as `tests/unit/schedules/test_shared_cards.py`."""
    job = on_four(16, "auto")

    def on(nodes: tuple[Node, ...], message_s: float) -> tuple[float, int]:
        found = forecast(job, Machines(nodes, Link(message_bytes(job) * 8 / 1e9 / message_s)), UNIT)
        return found.parts["pipeline"], found.lookahead

    assert on(HOSTS, 1.0) == (pytest.approx(63), 1)
    assert on(HOSTS, 2.0) == (pytest.approx(80), 3)
    # On two hosts one channel crosses each way.
    assert on((Node("a", 2), Node("b", 2)), 2.0)[0] < 66


def test_a_links_use_is_that_of_the_busier_card_at_its_ends() -> None:
    job = on_four(16, 3)
    found = forecast(job, Machines(HOSTS, Link(message_bytes(job) * 8 / 1e9 / 2.0)), UNIT)
    assert [use.busy for use in found.links] == pytest.approx([2 * 16 * 2.0 / found.step_s] * 3)
    assert all(use.message_s == pytest.approx(2.0) for use in found.links)


@pytest.mark.gate
def test_a_very_long_program_says_that_cards_are_left_out() -> None:
    def left_out(microbatches: int) -> bool:
        job = on_four(microbatches, 0)
        found = forecast(job, Machines(HOSTS, Link(message_bytes(job) * 8 / 1e9)), UNIT)
        return any("share no card" in source for source in found.assumptions)

    assert not left_out(512)
    assert left_out(513)
