"""Reports of a driver arrive whole, whatever other processes print into the same log."""

import os
from pathlib import Path

import pytest

from raypp.control.cluster_call import Call, reports_of
from raypp.control.clusters.find import Cluster
from raypp.control.clusters.local import LocalCluster
from raypp.control.clusters.local_servers import S3Process
from raypp.own_process import OwnProcess

DRIVER = """
import os
import sys

from raypp.control.calls import print_report

child = os.fork()
while child == 0:
    os.write(1, b"a worker died@")
for step in range(2000):
    print_report({"progress": step})
os.kill(child, 9)
os.wait()
sys.stdout.write("half of a bar")
print_report({"answer": 7})
""".replace("@", "\\n")
"""A child writes into the same pipe all the time; a bar stands there without a line break."""


def test_reports_are_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "noisy_driver.py").write_text(DRIVER)
    (tmp_path / "token").write_text("secret")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    me = OwnProcess.of(os.getpid())
    s3 = S3Process("http://127.0.0.1:1", "K", "S", me.pid, me.started, (1,), str(tmp_path))
    files = str(tmp_path / "token"), str(tmp_path), "python"
    embedded = LocalCluster("http://127.0.0.1:1", "127.0.0.1:1", 8, me, s3, *files, 1)
    cluster = Cluster(embedded.dashboard, embedded.client(), embedded)
    reports = list(reports_of(cluster, Call("noisy", "noisy_driver")))
    assert reports == [*({"progress": step} for step in range(2000)), {"answer": 7}]
