"""On a real Ray cluster: causes of death, preemption notices, and no recorded secret."""

import os
import signal
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from raypp.control.clusters.find import Cluster
from tests.ray.conftest import Started, StartRun

pytestmark = pytest.mark.timeout(400)


def _failure(run: Started) -> tuple[str, str, str]:
    details = run.event("rank_failed").details
    return details["kind"], details["cause"], details["evidence"]


@pytest.mark.slow
def test_a_segfault_is_named_with_its_signal_and_the_run_goes_on(start_run: StartRun) -> None:
    run = start_run("segfault", steps=20, fault="segfault:1:7:1")
    assert run.wait_end()["state"] == "SUCCEEDED"
    kind, cause, evidence = _failure(run)
    assert kind == "segfault" and "SIGSEGV" in cause, (cause, evidence)
    assert "string_at" in evidence


@pytest.mark.slow
def test_a_full_disk_is_named_with_its_place(start_run: StartRun) -> None:
    run = start_run("full", steps=20, fault="full:1:7:1")
    assert run.wait_end()["state"] == "SUCCEEDED"
    kind, cause, _ = _failure(run)
    assert kind == "disk_full" and "/mnt/full is full" in cause


@pytest.mark.gate
def test_a_rank_that_gets_a_notice_to_end_is_saved_first_and_that_counts_for_no_failure(start_run: StartRun) -> None:
    run = start_run("notice", steps=200, every=0, hold=6, recovery={"max_restarts": 0})
    run.wait_step(5)
    os.kill(run.pids()[2], signal.SIGTERM)
    run.let_go()
    status = run.wait_end()
    assert (status["state"], status["restarts"]) == ("SUCCEEDED", 1), run.reader.status()
    kinds = run.kinds()
    assert "preemption_notice" in kinds and kinds.index("preemption_notice") < kinds.index("committed")
    kind, cause, _ = _failure(run)
    assert kind == "preempted" and "after a checkpoint at step" in cause
    assert [row["step"] for row in run.reader.history()] == list(range(1, 201))


def test_the_cluster_takes_no_job_without_its_token(cluster: Cluster) -> None:
    for path, body in (("/api/jobs/", b'{"entrypoint": "id"}'), ("/api/jobs/", None), ("/api/v0/actors", None)):
        for token in ("", "Bearer wrong"):
            headers = {"Authorization": token} if token else {}
            request = urllib.request.Request(cluster.address + path, data=body, headers=headers)
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(request, timeout=30)
            assert refused.value.code in (401, 403)


def test_no_secret_of_the_environment_is_in_anything_a_run_writes(
    start_run: StartRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key-value-of-mine")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "aws-value-of-mine")
    monkeypatch.setenv("AWS_REGION", "mars-1")
    place = tmp_path / "secrets"
    secret = {"STAND_IN_DIR": str(place), "WANDB_API_KEY": "wandb-value-of-mine", "STAND_IN_FAULT": "say:1:7:1"}
    secret |= {"NOBODY_KNOWS": "another-value-of-mine"}
    run = start_run("secrets", steps=20, resources={"env": secret, "cpus_per_rank": 1})
    assert run.wait_end()["state"] == "SUCCEEDED"
    seen = (place / "environment-1").read_text()
    assert "WANDB_API_KEY=wandb-value-of-mine" in seen and "AWS_SECRET_ACCESS_KEY=aws-value-of-mine" in seen
    assert "NOBODY_KNOWS=another-value-of-mine" in seen and "AWS_ACCESS_KEY_ID=key-value-of-mine" in seen
    run.wait(lambda: any("***" in line.text for line in run.reader.logs()), "the scrubbed line of the log")
    assert "***" in _failure(run)[1]
    written = [path for path in (tmp_path / "store").rglob("*") if path.is_file()]
    assert written and not any(b"value-of-mine" in path.read_bytes() for path in written)
    dashboard = run.cluster.dashboard
    assert b"mars-1" in dashboard.request("GET", "/api/jobs/")
    for path in ("/api/jobs/", "/api/v0/actors?detail=1", "/api/v0/workers?detail=1", "/api/v0/runtime_envs?detail=1"):
        assert b"value-of-mine" not in dashboard.request("GET", path)
    assert "value-of-mine" not in dashboard.job_logs(run.submission_id)
    assert run.cluster.embedded is not None
    folder = Path(run.cluster.embedded.ray_dir)
    files = [path for path in folder.glob("*/session_2*/runtime_resources/**/*") if path.is_file()]
    assert any(path.name == "raypp-run.json" for path in files)
    assert [path for path in files if b"value-of-mine" in path.read_bytes()] == [], "not in a package either"
