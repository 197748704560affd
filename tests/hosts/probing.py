"""A rank of a pipeline, one per host, that times its channels: `probing.py RANK ADDRESS BYTES`."""

import json
import os
import sys

import torch
import torch.distributed as dist

from raypp.stages.pipeline.link_probe import Channels

HOSTS = 3


def main() -> None:
    rank, address, size = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{address}:29611", rank=rank, world_size=HOSTS)
    up, down = dist.new_group(range(HOSTS)), dist.new_group(range(HOSTS))
    stages, device = list(range(HOSTS)), torch.device("cpu")
    channels = Channels(rank, stages, up, down, device)
    channels.connect()
    found = channels.time(size, dist.barrier)
    print(json.dumps([[*channel, times.wire_s, times.crowded_s] for channel, times in found.items()]))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
