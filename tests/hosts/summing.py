"""One of two ranks that reduce-scatter a vector. Prints whether its part is right. Arguments: rank,
address."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

from raypp.parallel.late_sums import LateSums

os.environ.setdefault("GLOO_SOCKET_IFNAME", "eth0")
rank, size = int(sys.argv[1]), 1_000_000
dist.init_process_group("gloo", init_method=f"tcp://{sys.argv[2]}:29600", rank=rank, world_size=2)
own = torch.arange(2 * size, dtype=torch.float32) * (rank + 1)
sums, result = LateSums(late=True), torch.empty(size)
sums(result, own, dist.group.WORLD, dist.ReduceOp.SUM)  # type: ignore[arg-type]
sums.wait()
right = torch.equal(result, torch.arange(2 * size, dtype=torch.float32)[rank * size :][:size] * 3)
sys.stdout.write("right" if right else "wrong")
dist.destroy_process_group()
