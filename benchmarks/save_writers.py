"""The writers of the save benchmark: raypp's, raw boto3, and DCP's with other projects' storage.

Each writer has calls to begin a save, after which training may continue; to report how long a step
had to wait; and to finish, which returns once the save is durable.
"""

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]

BUCKET = "bench"
PART_BYTES, IN_FLIGHT = 16 << 20, 4
WIDTH = 1024
Answer = dict[str, Any]


@dataclass(frozen=True)
class Place:
    """The rank of a writer, the world it belongs to, and the MB of its state."""

    rank: int
    world: int
    port: int
    megabytes: int


class Writer:
    """The writer of one rank; here one whose saves are durable when `begin` returns."""

    def __init__(self, place: Place) -> None:
        self.stage = layers(place.megabytes, place.rank)
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.stage.parameters(), fused=True)
        step(self.stage, self.optimizer, torch.ones(1, WIDTH))

    def begin(self, number: int) -> None:
        """Begins a save and returns once the weights may change again."""
        raise NotImplementedError

    def busy(self) -> bool:
        return False

    def held_s(self) -> float:
        """Returns the seconds that the step after `begin` waited for it."""
        return 0.0

    def finish(self) -> Answer:
        """Waits until the save is durable and returns facts about it."""
        return {}


def layers(megabytes: int, rank: int) -> nn.Module:
    """Builds square matrices of 4 MiB (12 MiB with AdamW's state), named by a global number."""
    count = max(1, round(megabytes / 12.6))
    stage = nn.Module()
    for index in range(rank * count, (rank + 1) * count):
        stage.add_module(f"layer{index}", nn.Linear(WIDTH, WIDTH, bias=False))
    return stage


def step(stage: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    for layer in stage.children():
        x = torch.tanh(layer(x))
    x.sum().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def state_bytes(stage: nn.Module) -> int:
    """Returns the bytes of the weights and AdamW's two moments."""
    return 3 * sum(parameter.numel() * 4 for parameter in stage.parameters())


class Raypp(Writer):
    def __init__(self, place: Place) -> None:
        from raypp.records import Coordinates, Seat
        from raypp.state.checkpoint.announce import Announcements
        from raypp.state.checkpoint.save import CheckpointSaver
        from raypp.storage import open_store

        super().__init__(place)
        self.server = TCPStore(
            "127.0.0.1", place.port, is_master=place.rank == 0, wait_for_workers=False, timeout=timedelta(seconds=60)
        )
        self.events: list[Any] = []
        run = f"run-{place.port}"  # one per team
        seat = Seat(run, 1, place.rank, place.world, Coordinates(pp=place.rank), Coordinates(place.world, 1, 1, 1, 1))
        self._begin_s = 0.0
        self.saver = CheckpointSaver(
            open_store(f"s3://{BUCKET}/raypp"), run, {}, seat, Announcements(self.server, 1),
            self, keep=1,  # type: ignore[arg-type]
        )  # fmt: skip

    def event(self, event: Any) -> None:
        self.events.append(event)

    def phase(self, *_: Any) -> None: ...

    def begin(self, number: int) -> None:
        self.saver.save(number, [self.stage], self.optimizer, {})
        self._begin_s = self.saver.last_stall_s

    def busy(self) -> bool:
        return self.saver.busy

    def held_s(self) -> float:
        return self.saver.last_stall_s - self._begin_s

    def finish(self) -> Answer:
        if self.saver.wait() is None:
            raise RuntimeError("; ".join(event.message for event in self.events))
        return {"facts": [event.details for event in self.events if event.kind == "committed"][-1:]}


class Boto3Parts(Writer):
    """The plain solution: threads call `upload_part` on parts of a buffer; boto3's own settings."""

    def __init__(self, place: Place) -> None:
        import boto3
        from botocore.config import Config

        super().__init__(place)
        self.client = boto3.client("s3", region_name="us-east-1", config=Config(s3={"addressing_style": "path"}))
        self.data = bytes(torch.randint(0, 255, (state_bytes(self.stage),), dtype=torch.uint8).numpy())
        self.place = {"Bucket": BUCKET, "Key": f"raw/{place.rank}"}

    def begin(self, number: int) -> None:
        upload = self.client.create_multipart_upload(**self.place)["UploadId"]

        def send(index: int) -> Answer:
            body = self.data[index * PART_BYTES : (index + 1) * PART_BYTES]
            answer = self.client.upload_part(**self.place, UploadId=upload, PartNumber=index + 1, Body=body)
            sums = {key: answer[key] for key in answer if key.startswith("Checksum") and key != "ChecksumType"}
            return {"PartNumber": index + 1, "ETag": answer["ETag"], **sums}

        with ThreadPoolExecutor(IN_FLIGHT) as pool:
            parts: Any = list(pool.map(send, range(-(-len(self.data) // PART_BYTES))))
        self.client.complete_multipart_upload(**self.place, UploadId=upload, MultipartUpload={"Parts": parts})


class Dcp(Writer):
    """torch's distributed checkpoint: `save` blocks, `async_save` returns once the state is copied.
    `writer`: creates the storage writer of a save, given its number."""

    def __init__(self, place: Place, writer: Callable[[int], Any], asynchronous: bool) -> None:
        dist.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{place.port}", rank=place.rank, world_size=place.world
        )
        super().__init__(place)
        self._writer, self._asynchronous = writer, asynchronous
        self._future: Future[Any] | None = None

    def begin(self, number: int) -> None:
        import torch.distributed.checkpoint as checkpoint

        state = dict(self.stage.state_dict())
        for name, parameter in self.stage.named_parameters():
            state |= {f"optim/{name}/{key}": value for key, value in self.optimizer.state[parameter].items()}
        writer = self._writer(number)
        if self._asynchronous:
            self._future = checkpoint.async_save(state, storage_writer=writer)  # type: ignore[assignment, attr-defined]
        else:
            checkpoint.save(state, storage_writer=writer)  # type: ignore[attr-defined]

    def busy(self) -> bool:
        return self._future is not None and not self._future.done()

    def finish(self) -> Answer:
        if self._future is not None:
            self._future.result()
            self._future = None
        return {}


def s3torchconnector(place: Place, asynchronous: bool = False) -> Dcp:
    from s3torchconnector import S3ClientConfig
    from s3torchconnector.dcp import S3StorageWriter

    os.environ["AWS_ENDPOINT_URL"] = os.environ["AWS_ENDPOINT_URL_S3"]
    config = S3ClientConfig(force_path_style=True, part_size=PART_BYTES)

    def writer(number: int) -> Any:
        return S3StorageWriter("us-east-1", f"s3://{BUCKET}/s3tc/{number}", s3client_config=config)

    return Dcp(place, writer, asynchronous)


def fsspec(place: Place, asynchronous: bool = False) -> Dcp:
    from benchmarks.torch_private import fsspec_writer

    writer_of = fsspec_writer()
    options: Any = {"endpoint_url": os.environ["AWS_ENDPOINT_URL_S3"], "default_block_size": PART_BYTES}

    def writer(number: int) -> Any:
        return writer_of(f"s3://{BUCKET}/fsspec/{number}", **options)

    return Dcp(place, writer, asynchronous)


WRITERS: dict[str, Callable[[Place], Writer]] = {
    "raypp": Raypp,
    "boto3_parts": Boto3Parts,
    "s3torchconnector": s3torchconnector,
    "s3torchconnector_async": lambda place: s3torchconnector(place, asynchronous=True),
    "fsspec": fsspec,
    "fsspec_async": lambda place: fsspec(place, asynchronous=True),
}
FOREIGN = tuple(name for name in WRITERS if name.startswith(("s3torch", "fsspec")))
"""The writers that need packages which raypp does not install."""
