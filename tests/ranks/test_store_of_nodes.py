"""Ranks on several nodes must use one store."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from harness import run_ranks

from raypp.checkpoint.run_spec import write_spec
from raypp.errors import JobError
from raypp.spec.load import job_document, parse_job
from raypp.storage import open_store
from raypp.train.own_seat import local_seat
from raypp.train.resume import check_shared

pytestmark = pytest.mark.ranks


def check(rank: int, world: int, port: int, folders: list[str]) -> str:
    job = parse_job({"name": "run", "mesh": {"fsdp": world}, "checkpoint": {"url": folders[rank]}})
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    try:
        seat = replace(local_seat(rank, world, port, job), local_world_size=1, node=f"node-{rank}")
        check_shared(open_store(folders[rank]), "run", seat)
        return ""
    except JobError as error:
        return str(error)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("case", ["shared", "own of each node", "without a job file"])
def test_a_directory_that_nodes_do_not_share_is_refused_where_the_run_is_missing(tmp_path: Path, case: str) -> None:
    folders = [str(tmp_path / str(0 if case == "shared" else rank)) for rank in range(2)]
    if case != "without a job file":
        document = job_document(parse_job({"name": "run", "checkpoint": {"url": folders[0]}}))
        write_spec(open_store(folders[0]), "run", document)
    told = run_ranks(2, check, folders)
    assert told[0] == ""
    assert ("node-1 does not hold the run 'run', which other nodes find" in told[1]) == (case == "own of each node")
