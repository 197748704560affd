"""One rank of `test_cables`: `giving_way.py RANK ADDRESS CAP_MBPS MESSAGES`.

Rank 0 sends messages to rank 1 and uploads to it meanwhile, under a cap, by a connection with the
mark of uploads. It prints how long an upload gave way that had the cable to itself, and one beside
the messages, whether messages were seen before, and whether they went on until the end.
"""

import json
import os
import socket
import sys
import threading

import torch
import torch.distributed as dist

from raypp.storage.rate_limit import OtherTraffic, Pace
from raypp.storage.s3_upload import low_priority_options

MESSAGE = 1 << 20
UPLOAD = 1 << 20
PORT = 29810


def take_uploads(listener: socket.socket) -> None:
    while True:
        connection, _ = listener.accept()
        with connection:
            while connection.recv(1 << 20):
                pass


def upload(address: str, pace: Pace) -> None:
    with socket.socket() as connection:
        for option in low_priority_options():
            connection.setsockopt(*option)
        connection.connect((address, PORT))
        for _ in range(0, UPLOAD, pace.piece_bytes):
            pace.take(pace.piece_bytes)
            connection.sendall(bytes(pace.piece_bytes))


def main() -> None:
    rank, addresses, cap, messages = int(sys.argv[1]), sys.argv[2].split(","), float(sys.argv[3]), int(sys.argv[4])
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    if rank == 1:
        listener = socket.create_server((addresses[1], PORT))
        threading.Thread(target=take_uploads, args=(listener,), daemon=True).start()
    dist.init_process_group("gloo", init_method=f"tcp://{addresses[0]}:29811", rank=rank, world_size=2)
    block = torch.zeros(MESSAGE, dtype=torch.uint8)
    dist.barrier()
    if rank == 1:
        for _ in range(messages):
            dist.recv(block, 0)
    else:
        traffic = OtherTraffic()
        before = traffic.is_under_way()
        pace = Pace(cap * 1e6 / 8, gives_way=traffic.is_under_way)
        upload(addresses[1], pace)
        alone_s = pace.yielded_s
        sender = threading.Thread(target=lambda: [dist.send(block, 1) for _ in range(messages)])
        sender.start()
        upload(addresses[1], pace)
        sending = sender.is_alive()
        sender.join()
        print(json.dumps({"before": before, "yielded_s": [alone_s, pace.yielded_s - alone_s], "sending": sending}))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
