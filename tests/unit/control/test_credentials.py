"""Which credentials of the submitter travel with a job."""

import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest

from raypp.control.client import collect_secrets, collect_settings
from raypp.control.clusters import find, known_runs, local
from raypp.control.clusters.dashboard import Dashboard
from raypp.control.clusters.find import Cluster, lend_store_settings
from raypp.control.clusters.local import LocalCluster, S3Process
from raypp.control.credentials import SECRETS, SETTINGS
from raypp.control.find_run import find_run
from raypp.kinds import STORES
from raypp.own_process import OwnProcess
from raypp.user_folder import write_private

ELSEWHERE = Cluster("http://10.0.0.1:8265", Dashboard("http://10.0.0.1:8265"))
KEYS = {"AWS_ACCESS_KEY_ID": "A", "AWS_SECRET_ACCESS_KEY": "S", "AWS_SESSION_TOKEN": "T"}


@pytest.fixture
def profile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Sets a profile whose keys are in a file, and no key in a variable."""
    for name in (*SECRETS, *SETTINGS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    file = tmp_path / "credentials"
    file.write_text("[lab]\n" + "".join(f"{name.lower()} = {value}\n" for name, value in KEYS.items()))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_PROFILE", "lab")


@pytest.mark.usefixtures("profile")
def test_the_keys_of_a_profile_travel_to_other_machines_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert collect_secrets() == KEYS
    assert collect_secrets(here=True) == {}
    monkeypatch.delenv("AWS_PROFILE")
    assert collect_secrets() == {}


@pytest.mark.usefixtures("profile")
def test_keys_in_variables_are_not_mixed_with_those_of_a_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "B")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "R")
    assert collect_secrets() == {"AWS_ACCESS_KEY_ID": "B", "AWS_SECRET_ACCESS_KEY": "R"}


@pytest.mark.usefixtures("profile")
def test_server_and_region_of_a_profile_travel_to_other_clusters(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert collect_settings(ELSEWHERE) == {}
    (tmp_path / "config").write_text("[profile lab]\nregion = eu-west-1\nendpoint_url = http://minio:9000\n")
    assert collect_settings(ELSEWHERE) == {"AWS_ENDPOINT_URL_S3": "http://minio:9000", "AWS_REGION": "eu-west-1"}
    assert collect_secrets() == KEYS
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://ceph:8080")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-west-2")
    in_variables = {"AWS_ENDPOINT_URL": "http://ceph:8080", "AWS_DEFAULT_REGION": "us-west-2"}
    assert collect_settings(ELSEWHERE) == in_variables


@pytest.fixture
def embedded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> LocalCluster:
    """An embedded cluster, of which this process is both servers, and no setting of a store."""
    monkeypatch.setattr(find, "_loan", find._Loan())
    for name in (*(name for store in STORES for name in store.chosen_by), *SECRETS, *SETTINGS, "RAYPP_ADDRESS"):
        monkeypatch.setenv(name, "")  # so that what is lent is taken back after the test
        monkeypatch.delenv(name)
    monkeypatch.setenv("RAYPP_HOME", str(tmp_path))
    me = OwnProcess.of(os.getpid())
    s3 = S3Process("http://127.0.0.1:8333", "K", "S", me.pid, me.started, (8333,), str(tmp_path))
    token = str(tmp_path / "token")
    write_private(Path(token), "secret")
    cluster = LocalCluster("http://127.0.0.1:8265", "127.0.0.1:6379", 8, me, s3, token, "/tmp/raypp-x", "python", 9090)
    write_private(local.directory() / "state.json", json.dumps(asdict(cluster)))
    assert local.find() == cluster
    return cluster


def test_the_store_of_the_embedded_cluster_is_lent_to_commands_that_use_it(
    embedded: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYPP_ADDRESS", "http://localhost:8265/#/jobs")
    assert lend_store_settings() == embedded.s3.endpoint
    assert collect_secrets() == {"AWS_ACCESS_KEY_ID": "K", "AWS_SECRET_ACCESS_KEY": "S"}


@pytest.mark.parametrize("address", [None, "http://127.0.0.1:8265/#/jobs", "localhost", "[::1]:8265", "auto"])
def test_the_embedded_cluster_s_token_is_sent_to_it_by_any_of_its_names(
    embedded: LocalCluster, address: str | None
) -> None:
    assert find.find_cluster(address).embedded == embedded


def test_auto_is_the_cluster_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAYPP_HOME", str(tmp_path))
    cluster = find.find_cluster("auto")
    assert (cluster.address, cluster.embedded) == ("http://127.0.0.1:8265", None)


@pytest.mark.parametrize("address", ["http://10.0.0.1:8265", "ray://no-dashboard"])
def test_the_store_of_the_embedded_cluster_is_not_lent_while_another_is_named(
    embedded: LocalCluster, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.setenv("RAYPP_ADDRESS", address)
    assert lend_store_settings() is None
    assert lend_store_settings(embedded) == embedded.s3.endpoint, "this command was told which it uses"


def test_the_records_of_a_run_of_the_embedded_cluster_are_read_while_another_is_named(
    embedded: LocalCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RAYPP_ADDRESS", ELSEWHERE.address)
    known_runs.remember_run(known_runs.RunPlace(str(tmp_path / "runs"), "a", embedded.dashboard, "job", 1.0))
    find_run("a")
    assert os.environ["AWS_ENDPOINT_URL_S3"] == embedded.s3.endpoint


@pytest.mark.usefixtures("embedded")
def test_the_records_of_a_run_of_another_cluster_are_read_from_the_user_s_own_store(tmp_path: Path) -> None:
    for name, address in (("far", "http://10.0.0.1:8265"), ("before", "http://127.0.0.1:9999")):
        known_runs.remember_run(known_runs.RunPlace(str(tmp_path / "runs"), name, address, "job", 1.0))
    known_runs.locate_run("before")
    assert "AWS_ENDPOINT_URL_S3" in os.environ, "the embedded cluster had another port when this run was submitted"
    known_runs.locate_run("far")
    assert "AWS_ENDPOINT_URL_S3" not in os.environ


@pytest.mark.usefixtures("embedded")
def test_nothing_of_the_embedded_cluster_is_sent_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    assert lend_store_settings() is not None, "a command may read a model before it knows its cluster"
    assert lend_store_settings(ELSEWHERE.embedded) is None
    assert lend_store_settings() is None
    assert (collect_secrets(), collect_settings(ELSEWHERE)) == ({}, {"AWS_REGION": "eu-west-1"})
