"""What travels in the package of a run's Ray job."""

import importlib.machinery
import io
import py_compile
import zipfile
from pathlib import Path

import pytest

from raypp.control import package
from raypp.control.credentials import PROFILE, SECRETS, SETTINGS
from raypp.control.package import build_package
from raypp.control.protocol import RunRequest
from raypp.job.availability import own_files
from raypp.job.load import parse_job
from raypp.kinds import STORES


def test_a_schedule_of_ones_own_module_travels_beside_raypp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_travelling_order.py").write_text("def build(): ...\n")
    job = parse_job({"name": "a", "pipeline": {"schedule": "my_travelling_order:build"}})
    name, content = build_package(None, own_files(job))
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        assert archive.read("my_travelling_order.py") == b"def build(): ...\n"
        assert "raypp/kinds.py" in archive.namelist()
    assert name != build_package(None)[0]


def test_compiled_files_travel_where_they_are_those_of_the_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "raypp"
    (root / "cli").mkdir(parents=True)
    for name in ("__init__.py", "fresh.py", "changed.py", "not_compiled.py", "cli/here.py"):
        (root / name).write_text(f"NAME = {name!r}\n")
        if name != "not_compiled.py":
            py_compile.compile(str(root / name), doraise=True)
    (root / "changed.py").write_text("NAME = 'another text'\n")
    monkeypatch.setattr(package.raypp, "__file__", str(root / "__init__.py"))
    _, content = build_package(RunRequest("a", {}))
    node = tmp_path / "node"
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        archive.extractall(node)
    compiled = {path.name.partition(".")[0] for path in node.rglob("*.pyc")}
    assert compiled == {"__init__", "fresh"}
    # Python uses them: the source, changed without its knowledge, is not read.
    (node / "raypp" / "fresh.py").write_text("NAME = 'not read'\n")
    loader = importlib.machinery.SourceFileLoader("raypp.fresh", str(node / "raypp" / "fresh.py"))
    code = loader.get_code("raypp.fresh")
    assert code is not None and "fresh.py" in code.co_consts


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
