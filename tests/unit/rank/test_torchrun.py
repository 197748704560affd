"""What `python -m raypp.rank` refuses before it meets other ranks."""

from pathlib import Path

import pytest

from raypp.errors import JobError
from raypp.job.job_file import load_job
from raypp.planning.decision import Facts
from raypp.ports import free_port
from raypp.rank import torchrun
from raypp.rank.joining.process_group import connect
from raypp.rank.own_seat import local_seat
from raypp.rank.torchrun import _agree_on_attempt, for_a_controller, main
from raypp.state.checkpoint.run_spec import read_decision
from raypp.storage.directory import DirectoryStore

JOB = """
name: a
data: {kind: synthetic}
mesh: {dp_replicate: 2}
train:
  steps: 200
  sync: {kind: outer, every_steps: auto, link_gbps: 1}
checkpoint: {every_steps: 100}
"""


def test_steps_between_outer_steps_are_a_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    assert main(["--job", f"{tmp_path}/job.yaml"]) == 2
    reported = capsys.readouterr().err
    assert "job.yaml:7" in reported and "auto is decided by `raypp submit`" in reported
    assert "--set train.sync.every_steps=N" in reported


def test_keys_that_only_a_controller_acts_on_are_named(tmp_path: Path) -> None:
    recovery = "recovery: {site_timeout_s: 30, on_nonfinite: stop}\nresources: {device: cpu, spares: 1}\n"
    (tmp_path / "job.yaml").write_text(JOB + recovery)
    job = load_job(f"{tmp_path}/job.yaml", ()).job
    assert for_a_controller(job) == ["recovery.site_timeout_s", "resources.spares"]


def test_all_ranks_take_what_rank_0_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    job, port = load_job(f"{tmp_path}/job.yaml", ["mesh={fsdp: 2}", "train.sync={kind: exact}"]).job, free_port()
    assert job.mesh.reduce_gradients == "auto"
    server = connect("127.0.0.1", port, 2, serve=True)
    facts = Facts("cuda", gpus=(2,), cards=("NVIDIA H100 80GB HBM3",), memory=80 << 30)
    monkeypatch.setattr(torchrun, "facts_here", lambda seat: facts)
    first = _agree_on_attempt(job, local_seat(0, 2, port, job), server, DirectoryStore(tmp_path / "store"))
    second = _agree_on_attempt(job, local_seat(1, 2, port, job), connect("127.0.0.1", port, 2, serve=False), None)
    assert first == second and read_decision(DirectoryStore(tmp_path / "store"), job.name, first[0]) == first[1]
    assert second[1].job.train.precision == "bf16" and second[1].job.mesh.reduce_gradients == "each_microbatch"


def test_a_rank_that_rank_0_has_left_is_asked_to_read_its_error(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    job, port = load_job(f"{tmp_path}/job.yaml", ()).job, free_port()
    server = connect("127.0.0.1", port, 2, serve=True)
    rendezvous = connect("127.0.0.1", port, 2, serve=False)
    del server
    with pytest.raises(JobError, match="see rank 0's error message"):
        _agree_on_attempt(job, local_seat(1, 2, port, job), rendezvous, None)
