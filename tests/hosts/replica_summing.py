"""One of two replicas that sum the gradient of a matrix. Prints whether the sum is right.

Arguments: rank, address, exact or int8.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from raypp.stages.parallel.replica_sums import ReplicaSums
from raypp.stages.parallel.shard import local_part

os.environ.setdefault("GLOO_SOCKET_IFNAME", "eth0")
rank, kind, width = int(sys.argv[1]), sys.argv[3], 2_000
dist.init_process_group("gloo", init_method=f"tcp://{sys.argv[2]}:29600", rank=rank, world_size=2)
torch.manual_seed(0)
stage = nn.Linear(width, width, bias=False)
fully_shard(stage, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp_replicate", "fsdp")))
assert isinstance(stage, FSDPModule)
stage.set_gradient_divide_factor(1.0)
stage.set_force_sum_reduction_for_comms(True)
sums = ReplicaSums(stage, int8=kind == "int8", late=True)
sums.allocate(stage)
rows = [torch.randn(1, width, generator=torch.Generator().manual_seed(one)) for one in range(2)]
stage(rows[rank]).sum().backward()
sums.wait()
gradient, wanted = local_part(stage.weight.grad), (rows[0] + rows[1]).expand(width, width)
error = float((gradient - wanted).norm() / wanted.norm())
right = torch.equal(gradient, wanted) if kind == "exact" else 0 < error < 0.01
sys.stdout.write("right" if right else f"wrong: {error}")
dist.destroy_process_group()
