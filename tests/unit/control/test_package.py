"""What travels in the package of a run's Ray job."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import pytest

from raypp.control.credentials import PROFILE, SECRETS, SETTINGS
from raypp.control.package import build_package
from raypp.kinds import STORES
from raypp.spec.load import parse_job
from raypp.spec.own_code import own_files


def test_a_schedule_of_ones_own_module_travels_beside_raypp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_travelling_order.py").write_text("def build(): ...\n")
    job = parse_job({"name": "a", "pipeline": {"schedule": "my_travelling_order:build"}})
    name, content = build_package(None, {}, own_files(job))
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        assert archive.read("my_travelling_order.py") == b"def build(): ...\n"
        assert "raypp/kinds.py" in archive.namelist()
    assert name != build_package(None, {})[0]


def test_the_variables_of_every_store_travel_and_no_secret_is_shown() -> None:
    for store in STORES:
        assert set(store.secrets) <= set(SECRETS)
        assert set(store.settings) <= set(SETTINGS)
        assert set(store.files) <= set(PROFILE)
    assert not set(SECRETS) & {*SETTINGS, *PROFILE}
    # Exactly these have travelled since the first version; nodes and guides rely on them.
    assert list(SECRETS) == [
        "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "HF_TOKEN",
    ]  # fmt: skip
