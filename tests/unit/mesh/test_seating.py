"""Which ranks share a node."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypp.errors import ResourcesError
from raypp.job.job import MeshSection
from raypp.planning.geometry import Mesh
from raypp.planning.machines import Machines, Node
from raypp.planning.seating import seat_order
from raypp.records import Coordinates, NodeFacts


def workers(*devices: int, ip: str = "10.0.0.{}") -> list[NodeFacts]:
    """Returns `devices` workers for each node, nodes ordered by address."""
    return [
        NodeFacts(f"node{node}", ip.format(node + 1), f"host{node}", 100 + device, "eth0", device)
        for node, count in enumerate(devices)
        for device in range(count)
    ]


def mesh_of(**axes: int) -> Mesh:
    return Mesh.of(MeshSection(**axes))


def nodes_of_ranks(mesh: Mesh, facts: list[NodeFacts]) -> list[str]:
    order = seat_order(mesh, facts)
    assert sorted(order) == list(range(mesh.world))
    return [facts[order.index(rank)].node_id for rank in range(mesh.world)]


def crossing(mesh: Mesh, facts: list[NodeFacts], axis: str | tuple[str, ...]) -> int:
    """Counts the groups of an axis with ranks on several nodes."""
    nodes = nodes_of_ranks(mesh, facts)
    return sum(len({nodes[rank] for rank in group}) > 1 for group in mesh.groups(axis))


@pytest.mark.parametrize("axes", [{"pp": 2, "fsdp": 4}, {"pp": 4, "fsdp": 2}])
def test_pp_crosses_nodes_and_neighbours_and_fsdp_stay_inside_one(axes: dict[str, int]) -> None:
    assert nodes_of_ranks(mesh_of(**axes), workers(4, 4)) == ["node0"] * 4 + ["node1"] * 4


@pytest.mark.parametrize(
    ("axes", "nodes", "axis", "broken"),
    [
        ({"pp": 2, "dp_replicate": 2, "fsdp": 2}, (4, 4), ("dp_replicate", "fsdp"), 0),
        ({"pp": 2, "dp_replicate": 2, "fsdp": 4}, (4, 4, 4, 4), "fsdp", 0),
        ({"fsdp": 2, "cp": 4}, (4, 4), "cp", 0),
        ({"pp": 4, "fsdp": 2}, (3, 3, 2), "fsdp", 1),
        ({"pp": 4, "fsdp": 2}, (3, 5), "fsdp", 1),
        ({"pp": 4, "fsdp": 2}, (6, 2), "fsdp", 0),
        ({"pp": 4, "fsdp": 2}, (1, 2, 2, 2, 1), "fsdp", 1),
        ({"pp": 2, "tp": 8}, (8, 8), "tp", 0),
        ({"pp": 2, "fsdp": 4, "tp": 2}, (6, 4, 6), "tp", 0),
        ({"pp": 2, "fsdp": 4, "tp": 2}, (6, 4, 6), ("fsdp", "tp"), 2),
        ({"fsdp": 2, "cp": 2, "tp": 2}, (2, 4, 2), ("cp", "tp"), 1),
        ({"pp": 2, "dp_replicate": 2, "tp": 2}, (4, 2, 2), "tp", 0),
    ],
)
def test_nodes_break_as_few_groups_as_they_must(
    axes: dict[str, int], nodes: tuple[int, ...], axis: str | tuple[str, ...], broken: int
) -> None:
    assert crossing(mesh_of(**axes), workers(*nodes), axis) == broken


def test_ranks_of_an_expert_group_stay_together_with_those_that_compute_layers_with_them() -> None:
    mesh = mesh_of(fsdp=4, tp=2, ep=2)
    nodes = nodes_of_ranks(mesh, workers(2, 4, 2))
    assert [len(set(nodes[first : first + 4])) for first in (0, 4)] in ([1, 2], [2, 1])


def test_the_devices_of_a_tp_group_are_neighbours() -> None:
    assert seat_order(mesh_of(pp=2, tp=2), workers(2, 2)) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("nodes", "fits"), [((6, 2), "mesh.tp 2 with mesh.fsdp 2"), ((5, 3), "mesh.tp 1 with mesh.fsdp 4")]
)
def test_a_tp_group_never_leaves_a_node(nodes: tuple[int, ...], fits: str) -> None:
    with pytest.raises(ResourcesError, match=rf"mesh.tp: .*10.0.0.1 has {nodes[0]}, 10.0.0.2 has {nodes[1]}") as error:
        seat_order(mesh_of(pp=2, tp=4), workers(*nodes))
    assert fits in error.value.problems[0].fix


def test_given_machines_hold_whole_tp_groups_or_refuse_them() -> None:
    mesh, spare = mesh_of(pp=2, tp=4), Machines((Node("a", 6), Node("b", 5)))
    assert [node.name for node in spare.seats(mesh)] == ["a"] * 4 + ["b"] * 4
    with pytest.raises(ResourcesError, match=r"mesh.tp: .*a has 7, b has 3"):
        Machines((Node("a", 7), Node("b", 3))).seats(mesh)


def test_addresses_sort_as_numbers() -> None:
    facts = workers(*[1] * 12)
    assert nodes_of_ranks(mesh_of(pp=12), facts) == [f"node{node}" for node in range(12)]


def test_devices_of_a_node_get_ranks_in_their_order() -> None:
    assert seat_order(mesh_of(pp=2, fsdp=2), list(reversed(workers(2, 2)))) == [3, 2, 1, 0]


@settings(max_examples=80, deadline=None)
@given(st.randoms(use_true_random=False), st.sampled_from([(2, 1, 2, 1), (2, 2, 2, 1), (3, 1, 2, 2), (4, 1, 1, 1)]))
def test_seats_do_not_depend_on_the_order_in_which_workers_come(
    shuffle: random.Random, shape: tuple[int, int, int, int]
) -> None:
    mesh, counts = Mesh(Coordinates(*shape, tp=1)), [1, 1, 1]
    while sum(counts) < mesh.world:
        counts[shuffle.randrange(3)] += 1
    if mesh.world == 4:
        counts = [1, 1, 2]
    facts = workers(*counts)
    rank_of = dict(zip(facts, seat_order(mesh, facts), strict=True))
    mixed = list(facts)
    shuffle.shuffle(mixed)
    assert dict(zip(mixed, seat_order(mesh, mixed), strict=True)) == rank_of


def test_workers_without_a_device_index_still_get_distinct_ranks() -> None:
    facts = [NodeFacts("node0", "127.0.0.1", "host", 0, "")] * 4
    assert seat_order(mesh_of(pp=2, fsdp=2), facts) == [0, 1, 2, 3]


def test_another_number_of_workers_than_ranks_is_an_error() -> None:
    with pytest.raises(ResourcesError, match="4 ranks, but there are 3 workers"):
        seat_order(mesh_of(pp=4), workers(3))


def sited(sites: dict[str, list[int]]) -> list[NodeFacts]:
    """Returns workers of sites whose nodes' addresses alternate."""
    made = []
    for index, (site, nodes) in enumerate(sites.items()):
        for number, devices in enumerate(nodes):
            ip = f"10.0.0.{1 + number * len(sites) + index}"
            made += [NodeFacts(ip, ip, ip, 0, "", device, site) for device in range(devices)]
    return made


@pytest.mark.parametrize(
    ("axes", "sites", "mixed"),
    [
        ({"pp": 2, "dp_replicate": 2}, {"a": [1, 1], "b": [1, 1]}, 0),
        ({"pp": 2, "dp_replicate": 2, "fsdp": 2}, {"a": [2, 2], "b": [2, 2]}, 0),
        ({"pp": 2, "dp_replicate": 3}, {"a": [1, 1, 1, 1], "b": [1, 1]}, 0),
        ({"pp": 3, "dp_replicate": 2}, {"a": [4], "b": [2]}, 1),
        ({"pp": 2, "dp_replicate": 2, "fsdp": 2}, {"a": [2, 2, 1], "b": [3]}, 1),
    ],
)
def test_replicas_that_train_apart_stay_within_sites_where_they_fit(
    axes: dict[str, int], sites: dict[str, list[int]], mixed: int
) -> None:
    mesh, facts = mesh_of(**axes), sited(sites)
    order = seat_order(mesh, facts, apart=True)
    site = {rank: fact.site for rank, fact in zip(order, facts, strict=True)}
    replicas = mesh.groups(("pp", "fsdp", "cp"))
    assert sorted(rank for replica in replicas for rank in replica) == list(range(mesh.world))
    assert sum(len({site[rank] for rank in replica}) > 1 for replica in replicas) == mixed
    shuffled = random.Random(0).sample(range(len(facts)), len(facts))
    again = seat_order(mesh, [facts[worker] for worker in shuffled], apart=True)
    assert again == [order[worker] for worker in shuffled]


def test_replicas_that_train_apart_run_through_nodes_in_the_order_of_addresses_without_labels() -> None:
    mesh = mesh_of(pp=2, dp_replicate=2)
    facts = workers(1, 1, 1, 1)
    assert [facts[seat_order(mesh, facts, apart=True).index(rank)].node_id for rank in range(4)] == [
        "node0", "node2", "node1", "node3",
    ]  # fmt: skip
