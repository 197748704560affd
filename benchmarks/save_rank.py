"""One rank of the save benchmark: a process that does as it is told on stdin and answers in JSON, line by line.

`python -m benchmarks.save_rank WRITER RANK WORLD PORT MEGABYTES`; the S3 server is in the environment.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

BUCKET = "bench"
PART_BYTES, IN_FLIGHT = 16 << 20, 4
WIDTH = 1024
Answer = dict[str, Any]


def layers(megabytes: int, rank: int) -> nn.Module:
    """Square matrices of 4 MiB; with AdamW's state each is 12 MiB. Named by a global number."""
    count = max(1, round(megabytes / 12.6))
    stage = nn.Module()
    for index in range(rank * count, (rank + 1) * count):
        stage.add_module(f"layer{index}", nn.Linear(WIDTH, WIDTH, bias=False))
    return stage


def trained(stage: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(stage.parameters(), fused=True)
    step(stage, optimizer, torch.ones(1, WIDTH))
    return optimizer


def step(stage: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    for layer in stage.children():
        x = torch.tanh(layer(x))
    x.sum().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def memory() -> tuple[int, int]:
    """Resident bytes now, and the most since `forget_peak`."""
    lines = dict(line.split(":", 1) for line in open("/proc/self/status") if line.startswith("Vm"))  # noqa: PTH123, SIM115
    return int(lines["VmRSS"].split()[0]) << 10, int(lines["VmHWM"].split()[0]) << 10


def forget_peak() -> None:
    with open("/proc/self/clear_refs", "w") as file:  # noqa: PTH123
        file.write("5")


def raypp_writer(rank: int, world: int, port: int, stage: nn.Module, run: str) -> tuple[Any, torch.optim.Optimizer]:
    from raypp.checkpoint.announce import StoreAnnouncements
    from raypp.checkpoint.save import CheckpointSaver
    from raypp.records import Coordinates, Seat
    from raypp.storage import open_store

    server = dist.TCPStore(
        "127.0.0.1", port, is_master=rank == 0, wait_for_workers=False, timeout=timedelta(seconds=60)
    )
    told: list[Any] = []

    class Keep:
        def event(self, event: Any) -> None:
            told.append(event)

        def phase(self, *_: Any) -> None: ...

    seat = Seat(run, 1, rank, world, Coordinates(pp=rank), Coordinates(world, 1, 1, 1))
    saver = CheckpointSaver(
        open_store(f"s3://{BUCKET}/raypp"),
        run,
        {},
        seat,
        StoreAnnouncements(server, 1),
        Keep(),
        keep=1,  # type: ignore[arg-type]
    )
    saver.told, saver.server = told, server  # type: ignore[attr-defined]
    return saver, trained(stage)


def raypp(rank: int, world: int, port: int, megabytes: int) -> Callable[[int], Answer]:
    stage = layers(megabytes, rank)
    saver, optimizer = raypp_writer(rank, world, port, stage, "upload")
    state = 3 * sum(p.numel() * 4 for p in stage.parameters())

    def save(number: int) -> Answer:
        forget_peak()
        before = memory()[0]
        saver.save(number, [stage], optimizer, {})
        committed = saver.wait()
        facts = [event.details for event in saver.told if event.kind == "committed"][-1:] if rank == 0 else []
        return {"committed": committed, "extra": (memory()[1] - before) / state, "facts": facts, "state": state}

    return save


def boto3_parts(rank: int, world: int, port: int, megabytes: int) -> Callable[[int], Answer]:
    """What anyone would write: parts of one buffer by `upload_part`, so many threads, boto3's own settings."""
    import boto3
    from botocore.config import Config

    client = boto3.client("s3", region_name="us-east-1", config=Config(s3={"addressing_style": "path"}))
    data = bytes(torch.randint(0, 255, (megabytes * 1_000_000,), dtype=torch.uint8).numpy())
    place = {"Bucket": BUCKET, "Key": f"raw/{rank}"}

    def save(number: int) -> Answer:
        upload = client.create_multipart_upload(**place)["UploadId"]

        def send(index: int) -> Answer:
            body = data[index * PART_BYTES : (index + 1) * PART_BYTES]
            answer = client.upload_part(**place, UploadId=upload, PartNumber=index + 1, Body=body)
            sums = {key: answer[key] for key in answer if key.startswith("Checksum") and key != "ChecksumType"}
            return {"PartNumber": index + 1, "ETag": answer["ETag"], **sums}

        with ThreadPoolExecutor(IN_FLIGHT) as pool:
            parts = list(pool.map(send, range(-(-len(data) // PART_BYTES))))
        client.complete_multipart_upload(**place, UploadId=upload, MultipartUpload={"Parts": parts})
        return {}

    return save


def dcp(rank: int, world: int, port: int, megabytes: int, writer: Callable[[str], Any]) -> Callable[[int], Answer]:
    import torch.distributed.checkpoint as checkpoint

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    stage = layers(megabytes, rank)
    optimizer = trained(stage)
    state = dict(stage.state_dict())
    for name, parameter in stage.named_parameters():
        state |= {f"optim/{name}/{key}": value for key, value in optimizer.state[parameter].items()}

    def save(number: int) -> Answer:
        checkpoint.save(state, storage_writer=writer(str(number)))
        return {}

    return save


def s3torchconnector(rank: int, world: int, port: int, megabytes: int) -> Callable[[int], Answer]:
    from s3torchconnector import S3ClientConfig
    from s3torchconnector.dcp import S3StorageWriter

    endpoint = os.environ["AWS_ENDPOINT_URL_S3"]
    os.environ["AWS_ENDPOINT_URL"] = endpoint
    config = S3ClientConfig(force_path_style=True, part_size=PART_BYTES)
    return dcp(
        rank, world, port, megabytes,
        lambda name: S3StorageWriter("us-east-1", f"s3://{BUCKET}/s3tc/{name}", s3client_config=config),
    )  # fmt: skip


def fsspec(rank: int, world: int, port: int, megabytes: int) -> Callable[[int], Answer]:
    from torch.distributed.checkpoint import FsspecWriter

    options = {"endpoint_url": os.environ["AWS_ENDPOINT_URL_S3"], "default_block_size": PART_BYTES}
    return dcp(
        rank, world, port, megabytes, lambda name: FsspecWriter(f"s3://{BUCKET}/fsspec/{name}", **options)
    )  # fmt: skip


def training(rank: int, world: int, port: int, megabytes: int) -> Callable[[int], Answer]:
    """Steps of about a second, in which a save begins or not: how long each took."""
    stage = layers(megabytes, rank)
    saver, optimizer = raypp_writer(rank, world, port, stage, "training")
    begun = time.perf_counter()
    step(stage, optimizer, torch.ones(64, WIDTH))
    rows = max(64, int(64 * 1.0 / (time.perf_counter() - begun)))
    x = torch.ones(rows, WIDTH)

    def save(number: int) -> Answer:
        saver.wait()
        plain = []
        for _ in range(2):
            started = time.perf_counter()
            step(stage, optimizer, x)
            plain.append(time.perf_counter() - started)
        saver.save(number, [stage], optimizer, {})
        started = time.perf_counter()
        step(stage, optimizer, x)
        beside = time.perf_counter() - started
        stall, begin = saver.last_stall_s, saver._before_s
        saver.wait()
        return {"stall": stall, "begin": begin, "plain": min(plain), "beside": beside}

    return save


def main() -> None:
    torch.set_num_threads(1)
    writer, numbers = sys.argv[1], [int(text) for text in sys.argv[2:]]
    writers = {f.__name__: f for f in (raypp, boto3_parts, s3torchconnector, fsspec, training)}
    save = writers[writer](*numbers)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        started = time.perf_counter()
        answer = save(int(line))
        print(json.dumps({"seconds": time.perf_counter() - started, **answer}), flush=True)
    # Destroying a group whose peer is gone already may hang; nothing is left to be said.
    os._exit(0)


if __name__ == "__main__":
    main()
