"""Ranks, coordinates, groups, placements."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypp.job.job import MeshSection
from raypp.planning.geometry import Mesh
from raypp.planning.seating import place_stages
from raypp.records import AXES, Coordinates

_NAMES = [axis.name for axis in AXES]
sizes = st.builds(Coordinates, *[st.integers(1, 3)] * len(AXES))


def mesh_of(**axes: int) -> Mesh:
    return Mesh.of(MeshSection(**axes))


def test_pp_is_the_slowest_axis_and_cp_the_fastest() -> None:
    mesh = mesh_of(pp=2, dp_replicate=2, fsdp=2, cp=2)
    assert mesh.world == 16
    assert mesh.coordinates(0) == Coordinates(0, 0, 0, 0)
    assert mesh.coordinates(1) == Coordinates(cp=1)
    assert mesh.coordinates(2) == Coordinates(fsdp=1)
    assert mesh.coordinates(4) == Coordinates(dp_replicate=1)
    assert mesh.coordinates(8) == Coordinates(pp=1)


@given(sizes)
def test_ranks_and_coordinates_are_each_others_inverse(shape: Coordinates) -> None:
    mesh = Mesh(shape)
    assert [mesh.rank(mesh.coordinates(rank)) for rank in range(mesh.world)] == list(range(mesh.world))


@given(sizes, st.lists(st.sampled_from(_NAMES), min_size=1, max_size=3, unique=True))
def test_groups_share_out_all_ranks_and_differ_only_along_their_axes(shape: Coordinates, axes: list[str]) -> None:
    mesh = Mesh(shape)
    groups = mesh.groups(axes)
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.world))
    for group in groups:
        places = [mesh.coordinates(rank) for rank in group]
        assert group == sorted(group)
        assert all(len({getattr(place, axis) for place in places}) == 1 for axis in _NAMES if axis not in axes)


def test_groups_of_a_mesh_by_hand() -> None:
    mesh = mesh_of(pp=2, fsdp=2, cp=2)
    assert mesh.groups("pp") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert mesh.groups("fsdp") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert mesh.groups("cp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert mesh.groups(("fsdp", "cp")) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert mesh.groups(("cp", "fsdp")) == mesh.groups(("fsdp", "cp"))
    assert mesh.groups(("pp", "cp")) == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_what_is_outside_a_mesh_is_refused() -> None:
    with pytest.raises(IndexError):
        mesh_of(pp=2).coordinates(2)
    with pytest.raises(KeyError):
        mesh_of(pp=2).groups("ep")


def test_stages_go_round_in_a_loop_and_turn_in_a_v() -> None:
    assert place_stages(4, 8, "loop") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert place_stages(4, 8, "v") == [[0, 7], [1, 6], [2, 5], [3, 4]]
    assert place_stages(2, 6, "v") == [[0, 3, 4], [1, 2, 5]]
    assert place_stages(1, 3, "v") == [[0, 1, 2]]
    with pytest.raises(ValueError, match="cannot be divided evenly"):
        place_stages(4, 6, "loop")


@given(sizes)
def test_ranks_that_differ_along_pp_or_cp_read_the_same_replica(shape: Coordinates) -> None:
    mesh = Mesh(shape)
    found = {rank: mesh.coordinates(rank).replica(shape) for rank in range(mesh.world)}
    assert set(found.values()) == set(range(shape.dp_replicate * shape.fsdp))
    for group in mesh.groups(("pp", "cp")):
        assert len({found[rank] for rank in group}) == 1
    by_hand = Coordinates(dp_replicate=2, fsdp=3).replica(Coordinates(1, 3, 4, 1, 1))
    assert by_hand == 11


def test_every_rank_has_a_label() -> None:
    assert mesh_of(pp=2, fsdp=2).labels() == ["pp0-fsdp0", "pp0-fsdp1", "pp1-fsdp0", "pp1-fsdp1"]


def test_every_axis_is_a_field_of_coordinates_and_a_key_of_a_job() -> None:
    assert list(Coordinates().as_dict()) == _NAMES
    assert [name for name in MeshSection.model_fields if name in _NAMES] == _NAMES
