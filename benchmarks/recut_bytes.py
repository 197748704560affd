"""Compares the bytes that a load onto another mesh reads with the bytes that its ranks need."""

import subprocess
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.tables import head
from raypp.ports import free_port
from raypp.records import Coordinates, Reporter, Seat
from raypp.state.checkpoint.announce import Announcements
from raypp.state.checkpoint.load_checkpoint import load_checkpoint
from raypp.state.checkpoint.save import CheckpointSaver
from raypp.state.checkpoint.state import gather_state
from raypp.storage import open_store

LAYERS, WIDTH, RUN = 8, 1024, "recut"
MESHES = ((2, 1), (1, 1), (4, 1), (1, 2), (2, 2), (1, 4))
"""Meshes as pp × fsdp. The first one writes the checkpoint."""


class _Silent:
    def event(self, event: Any) -> None: ...
    def phase(self, *_: Any) -> None: ...


def recut_table(folder: str) -> list[str]:
    size = f"{LAYERS * WIDTH * WIDTH * 12 / 1e6:.0f} MB in matrices of {WIDTH} × {WIDTH}"
    lines = [f"State of {size}, written by pp 2.", head("read by | bytes read ÷ needed, all ranks | worst rank")]
    for pp, fsdp in MESHES:
        world, port = pp * fsdp, free_port()
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.recut_bytes", folder, str(pp), str(fsdp), str(rank), str(port)],
                stdout=subprocess.PIPE, text=True,
            )
            for rank in range(world)
        ]  # fmt: skip
        answers = [process.communicate()[0].split() for process in processes]
        if (pp, fsdp) != MESHES[0]:
            pairs = [(int(read), int(needed)) for read, needed in answers]
            total = sum(read for read, _ in pairs) / sum(needed for _, needed in pairs)
            lines.append(f"| pp {pp} × fsdp {fsdp} | {total:.4f} | {max(r / n for r, n in pairs):.4f} |")
    return [*lines, "", "(goal ≤ 1.05)"]


def main() -> None:
    folder = sys.argv[1]
    pp, fsdp, rank, port = (int(text) for text in sys.argv[2:])
    torch.set_num_threads(1)
    server = TCPStore("127.0.0.1", port, pp * fsdp, is_master=rank == 0)
    dist.init_process_group("gloo", store=PrefixStore("group", server), rank=rank, world_size=pp * fsdp)
    mesh = init_device_mesh("cpu", (pp, fsdp), mesh_dim_names=("pp", "fsdp"))
    place = Coordinates(pp=rank // fsdp, fsdp=rank % fsdp)
    each = LAYERS // pp
    stage = nn.ModuleDict(
        {str(n): nn.Linear(WIDTH, WIDTH, bias=False) for n in range(place.pp * each, (place.pp + 1) * each)}
    )
    if fsdp > 1:
        for layer in stage.values():
            fully_shard(layer, mesh=mesh["fsdp"])
    optimizer = torch.optim.AdamW(stage.parameters())
    store = open_store(folder)
    if (pp, fsdp) == MESHES[0]:
        for parameter in stage.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        seat = Seat(RUN, 1, rank, pp * fsdp, place, Coordinates(pp, 1, fsdp, 1, 1))
        reporter: Reporter = _Silent()  # type: ignore[assignment]
        saver = CheckpointSaver(store, RUN, {}, seat, Announcements(server, 1), reporter, keep=1)
        saver.save(1, [stage], optimizer, {})
        saver.wait()
    else:
        loaded = load_checkpoint(store, RUN, 1, [stage], optimizer)
        assert loaded is not None
        needed = sum(part.tensor.nbytes for part in gather_state([stage], optimizer).values())
        print(loaded.bytes_read, needed, flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
