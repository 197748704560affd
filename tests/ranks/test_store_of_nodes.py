"""Ranks on several nodes must use one store."""

from dataclasses import replace
from pathlib import Path

import torch.distributed as dist
from harness import run_in_turn

from raypp.errors import JobError
from raypp.job.load import job_document, parse_job
from raypp.rank.own_seat import local_seat
from raypp.rank.step.resume import check_shared
from raypp.state.checkpoint.run_spec import write_spec
from raypp.storage import open_store


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


def test_a_directory_that_nodes_do_not_share_is_refused_where_the_run_is_missing(tmp_path: Path) -> None:
    shared, own, bare = ([str(tmp_path / case / name) for name in names] for case, *names in (
        ("shared", "0", "0"), ("own", "0", "1"), ("without a job file", "0", "1")
    ))  # fmt: skip
    for folder in (shared[0], own[0]):
        document = job_document(parse_job({"name": "run", "checkpoint": {"url": folder}}))
        write_spec(open_store(folder), "run", document)
    for folders, found in zip((shared, own, bare), run_in_turn(2, check, [(shared,), (own,), (bare,)]), strict=True):
        assert found[0] == ""
        refused = "node-1 does not hold the run 'run', which other nodes find" in found[1]
        assert refused == (folders is own)
