"""Which credentials of the submitter travel with a job."""

from __future__ import annotations

from pathlib import Path

import pytest

from raypp.clusters.dashboard import Dashboard
from raypp.clusters.find import Cluster
from raypp.control.client import collect_secrets, collect_settings
from raypp.control.credentials import SECRETS, SETTINGS
from raypp.kinds import STORES

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


def test_what_a_store_finds_elsewhere_is_named_like_its_secrets() -> None:
    assert set(KEYS) == set(STORES.get("s3").secrets)
