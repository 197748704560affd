"""Checkpoints written by one mesh and loaded by another, on real gloo ranks, keep every bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from collecting_reporter import CollectingReporter
from harness import run_in_turn
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from training import whole

from raypp.records import Coordinates, Seat
from raypp.state.checkpoint.announce import Announcements
from raypp.state.checkpoint.commit import read_commit
from raypp.state.checkpoint.load_checkpoint import load_checkpoint
from raypp.state.checkpoint.save import CheckpointSaver
from raypp.state.checkpoint.state import gather_state
from raypp.storage.directory import DirectoryStore

RUN = "recut"
LAYERS = 4
# Odd sizes: 2, 3 and 4 ranks get uneven shards, and a norm of 2 elements leaves some without any.
WIDTH = 7


class CountingStore(DirectoryStore):
    read = 0

    def get(self, key: str, start: int | None = None, end: int | None = None) -> bytes:
        data = super().get(key, start, end)
        self.read += len(data)
        return data


class Block(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)
        self.gain = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x))) * self.gain.sum()


class Stage(nn.Module):
    def __init__(self, layers: range, width: int, inner: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(index): Block(width, inner) for index in layers})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


def rank_life(
    rank: int,
    world: int,
    port: int,
    sizes: tuple[int, int, int],
    root: str,
    save: bool,
    width: int = WIDTH,
    inner: int = 5,
) -> dict[str, Any]:
    """Builds this rank's stage on a pp × dp_replicate × fsdp mesh. Trains and saves it, or loads
    it.

    Returns:
        The tensors of its state, whole and by global name, if the state is small; the reported
        events; the bytes read and the bytes needed.
    """
    pp, replicate, fsdp = sizes
    server = dist.TCPStore("127.0.0.1", port, world, is_master=rank == 0)
    dist.init_process_group("gloo", store=dist.PrefixStore("train", server), rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("pp", "dp_replicate", "fsdp"))
    place = mesh.get_coordinate()
    assert place is not None
    coordinates = Coordinates(pp=place[0], dp_replicate=place[1], fsdp=place[2])
    torch.manual_seed(100 if save else 200)
    blocks = Stage(range(LAYERS), width, inner)
    per_stage = LAYERS // pp
    stage = Stage(range(place[0] * per_stage, (place[0] + 1) * per_stage), width, inner)
    own = {name: value for name, value in blocks.state_dict().items() if name in stage.state_dict()}
    stage.load_state_dict(own)
    if replicate * fsdp > 1:
        for layer in stage.layers.values():
            fully_shard(layer, mesh=mesh["dp_replicate", "fsdp"], reshard_after_forward=False)
        fully_shard(stage, mesh=mesh["dp_replicate", "fsdp"], reshard_after_forward=False)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=0.01)
    store, quiet = CountingStore(Path(root)), CollectingReporter()
    seat = Seat(RUN, 1, rank, world, coordinates, Coordinates(*sizes, 1, 1))
    saved = None
    if save:
        for step in range(2):
            torch.manual_seed(step)
            optimizer.zero_grad()
            stage(torch.randn(3, width)).square().sum().backward()
            optimizer.step()
        saver = CheckpointSaver(store, RUN, {}, seat, Announcements(server, 1), quiet, 3, commit_timeout_s=60)
        saver.save(2, [stage], optimizer, {"data_position": {"row": 24}})
        saved = saver.wait()
        saver.close()
    else:
        loaded = load_checkpoint(store, RUN, None, [stage], optimizer)
        assert loaded is not None
        assert loaded.data_position == {"row": 24}
        saved = loaded.step
    read = store.read
    needed = sum(s.tensor.numel() * s.tensor.element_size() for s in gather_state([stage], optimizer).values())
    state: dict[str, Any] = {}
    for name, parameter in stage.named_parameters() if width == WIDTH else ():
        state[name] = whole(parameter)
        for key, value in optimizer.state[parameter].items():
            state[f"{name}/{key}"] = whole(value)
    dist.barrier()
    dist.destroy_process_group()
    kinds = [event.kind for event in quiet.events]
    return {"state": state, "step": saved, "events": kinds, "read": read, "needed": needed}


def merged(results: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = {}
    for result in results:
        for name, value in result["state"].items():
            assert name not in state or torch.equal(state[name], value)
            state[name] = value
    return state


def world_of(sizes: tuple[int, int, int]) -> int:
    return sizes[0] * sizes[1] * sizes[2]


Sizes = tuple[int, int, int]
MOVES: list[tuple[Sizes, Sizes]] = [
    ((1, 1, 2), (1, 1, 1)),
    ((1, 1, 1), (1, 1, 2)),
    ((1, 1, 3), (1, 1, 2)),
    ((2, 1, 2), (1, 1, 2)),
    ((1, 2, 2), (2, 1, 1)),
]
LARGE = ((2, 1, 1), (1, 1, 2))
"""A mesh change with large slices, 2 MB each, as real runs move tens of megabytes. No size is a
multiple of a checksum block."""
LARGE_WIDTHS = (1501, 701)


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[Sizes, Sizes], tuple[Path, list, list]]:
    """Returns for each mesh change: its store, what the saving ranks found, and what the loading
    ranks found. Changes between the same numbers of ranks share their processes."""
    roots = {move: tmp_path_factory.mktemp("recut") for move in (*MOVES, LARGE)}
    results: dict[bool, dict[tuple[Sizes, Sizes], list]] = {}
    for save in (True, False):
        results[save] = {}
        for world in range(1, 5):
            moves = [move for move in roots if world_of(move[0] if save else move[1]) == world]
            cases = [
                (move[0] if save else move[1], str(roots[move]), save, *(LARGE_WIDTHS if move == LARGE else ()))
                for move in moves
            ]
            if cases:
                results[save] |= dict(zip(moves, run_in_turn(world, rank_life, cases), strict=True))
    return {move: (root, results[True][move], results[False][move]) for move, root in roots.items()}


@pytest.mark.parametrize("move", MOVES, ids=lambda move: "-to-".join("pp{}dp{}fsdp{}".format(*sizes) for sizes in move))
def test_what_one_mesh_saved_another_loads_bit_for_bit(move: tuple[Sizes, Sizes], moved: Any) -> None:
    _, wrote, read = moved[move]
    assert [result["step"] for result in wrote] == [2] * len(wrote)
    assert wrote[0]["events"] == ["committed"]
    assert [result["step"] for result in read] == [2] * len(read)
    expected, loaded = merged(wrote), merged(read)
    assert expected.keys() == loaded.keys() and len(expected) == LAYERS * 5 * 4
    assert all(torch.equal(expected[name], loaded[name]) for name in expected)


def test_what_replicas_hold_alike_is_written_once(moved: Any) -> None:
    root, _, _ = moved[(1, 2, 2), (2, 1, 1)]
    commit = read_commit(DirectoryStore(root), RUN, 2)
    assert [record.rank for record in commit.objects] == [0, 1]


def test_a_rank_of_another_mesh_reads_little_more_than_its_part(moved: Any) -> None:
    for result in moved[LARGE][2]:
        assert result["needed"] > 50e6
        assert result["read"] / result["needed"] <= 1.05
