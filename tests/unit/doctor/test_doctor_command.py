"""What `raypp doctor` sends to a cluster, and the file that it writes."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hostile_world as hostile
import pytest
from test_doctor import _report

from raypp.cli.main import run
from raypp.control.calls import REPORT


class Examined:
    """A cluster that knows the end of an examination.

    Attributes:
        url: Of its dashboard.
        jobs: The Ray jobs it was sent.
    """

    def __init__(self, report: dict[str, Any]) -> None:
        self.url, self.jobs = "", list[dict[str, Any]]()
        self._answers = {
            "/api/version": {"ray_version": "2.60.0"}, "/api/v0/cluster_metadata": {}, "/api/packages": {},
            "/nodes": {"data": {"summary": []}}, "/api/cluster_status": {}, "/api/jobs/one/logs": {},
            "/api/jobs/one": {"status": "SUCCEEDED"},
        }  # fmt: skip
        self.finds(report)

    def finds(self, report: dict[str, Any]) -> None:
        self._answers["/api/jobs/one/logs"] = {"logs": f"{REPORT}{json.dumps({'answer': report})}\n"}

    def answer(self, path: str) -> bytes:
        return json.dumps(next(value for begin, value in self._answers.items() if path.startswith(begin))).encode()


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Examined]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAYPP_HOME", str(tmp_path))
    report = _report()
    report["nodes"][1]["shm_free"] = None
    cluster = Examined(report)

    def respond(method: str, path: str, body: bytes) -> tuple[int, bytes]:
        if method == "GET":
            return 200, cluster.answer(path)
        cluster.jobs.append(json.loads(body))
        return 200, b'{"submission_id": "one"}'

    with hostile.answering(respond) as cluster.url:
        yield cluster


def test_the_secrets_of_a_job_are_not_in_what_the_dashboard_shows(cluster: Examined, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(
        "name: a\ndata: {kind: synthetic}\nresources: {device: cpu, env: {WANDB_API_KEY: hush, NCCL_DEBUG: INFO}}\n"
    )
    run(["doctor", "job.yaml", "--address", cluster.url])
    (job,) = cluster.jobs
    assert "hush" not in json.dumps(job)
    assert "NCCL_DEBUG" in job["entrypoint"]


def test_nccl_is_asked_for_and_shown_with_the_setting_that_works(
    cluster: Examined, capsys: pytest.CaptureFixture[str]
) -> None:
    tries = [{"off": "", "error": "3 of 9 numbers are wrong"}, {"off": "P2P", "all_reduce": 9.25, "exchange": 8.0}]
    group = {"nodes": ["10.0.0.1"], "kind": "NCCL", "ranks": 4, "tries": tries}
    cluster.finds({**_report(), "groups": [group]})
    assert run(["doctor", "--address", cluster.url, "--nccl"]) == 1
    assert '"groups": true' in cluster.jobs[0]["entrypoint"]
    shown = " ".join(capsys.readouterr().out.split())
    assert "NCCL 10.0.0.1 4 without P2P 9.25 GB/s 8 GB/s" in shown
    assert "works only with NCCL_P2P_DISABLE=1; without: 3 of 9 numbers are wrong" in shown


def test_out_is_checked_before_anything_is_measured(cluster: Examined, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--address", cluster.url, "--out", "none/links.json"]) == 2
    assert "--out: cannot write none/links.json: " in capsys.readouterr().err
    assert cluster.jobs == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--first-hour",), "--store: the runs of --first-hour need a store"),
        (("--first-hour", "--json"), "--first-hour: it does not take --json"),
        (("job.yaml", "--first-hour"), "--first-hour: it does not take JOB"),
        (("--nodes", "10.0.0.1"), "--nodes: it limits --first-hour only"),
    ],
)
def test_what_the_first_hour_cannot_use_is_refused_before_anything_is_measured(
    cluster: Examined, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    assert run(["doctor", *words, "--address", cluster.url]) == 2
    assert said in capsys.readouterr().err
    assert cluster.jobs == []
