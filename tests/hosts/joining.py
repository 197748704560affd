"""One rank that joins a group of two hosts, reports it, and leaves: `joining.py SEAT-AS-JSON`."""

import json
import logging
import sys

import torch
import torch.distributed as dist

from raypp.errors import RayppError
from raypp.rank.joining.process_group import joined
from raypp.records import Coordinates, Seat

logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)

given = json.loads(sys.argv[1])
seat = Seat(
    **given | {"nodes": tuple(given["nodes"])}, run="joining", attempt=1, coordinates=Coordinates(pp=given["rank"]),
    mesh_sizes=Coordinates(2, 1, 1, 1, 1), secret="5e" * 32,
)  # fmt: skip
try:
    with joined(seat, 30, tell=lambda event: print(event.kind, event.message, flush=True)):
        total = torch.ones(1)
        dist.all_reduce(total)
        print("sum", int(total), flush=True)
except RayppError as error:
    print("refused:", error, flush=True)
    sys.exit(error.exit_code)
