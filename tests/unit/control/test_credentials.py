"""Which credentials of the submitter travel with a job."""

from __future__ import annotations

from pathlib import Path

import pytest

from raypp.control.client import collect_secrets
from raypp.control.credentials import SECRETS
from raypp.kinds import STORES

KEYS = {"AWS_ACCESS_KEY_ID": "A", "AWS_SECRET_ACCESS_KEY": "S", "AWS_SESSION_TOKEN": "T"}


@pytest.fixture
def profile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Sets a profile whose keys are in a file, and no key in a variable."""
    for name in (*SECRETS, "AWS_CONFIG_FILE"):
        monkeypatch.delenv(name, raising=False)
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


def test_what_a_store_finds_elsewhere_is_named_like_its_secrets() -> None:
    assert set(KEYS) == set(STORES.get("s3").secrets)
