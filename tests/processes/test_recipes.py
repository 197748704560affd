"""CONTRIBUTING's recipes work: with one file added, the new kind is recognised, planned and trained
everywhere.

tests/ranks/test_recipes_on_ranks.py runs the contract tests on the new kinds and trains with them.
"""

import json
from pathlib import Path

import pytest
from recipes import SCHEDULE, job_text, python_in, tree_with

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tree_with(tmp_path_factory.mktemp("recipes"))


def test_new_kinds_are_listed_explained_and_planned_with(tree: Path) -> None:
    kinds = json.loads(python_in(tree, "-m", "raypp", "list-kinds", "--json").stdout)
    for key, name in (
        ("pipeline.schedule", "pairs"),
        ("data.kind", "lines"),
        ("checkpoint.url", "shelf"),
        ("train.optimizer.kind", "signs"),
    ):
        (entry,) = [entry for entry in kinds[key] if entry["name"] == name]
        assert entry["available"] and entry["summary"]
    assert "pairs" in python_in(tree, "-m", "raypp", "explain", "pipeline.schedule").stdout
    (tree / "job.yaml").write_text(job_text(tree))
    done = python_in(tree, "-m", "raypp", "plan", "job.yaml", "--json")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["schedule"] == "pairs"
    assert plan["program"][0].startswith("0F0 0F1 0B0 0B1 0F2 0F3")
    assert plan["memory"][0]["optimizer"] == 0


def test_a_plan_without_the_data_says_what_the_source_needs(tree: Path) -> None:
    (tree / "job.yaml").write_text(job_text(tree))
    done = python_in(tree, "-m", "raypp", "plan", "job.yaml", "--set", "data.path=null")
    assert done.returncode == 2
    assert "data.path=null: is missing: kind lines reads files" in done.stderr


def test_the_search_tries_a_new_schedule(tree: Path) -> None:
    code = """
from raypp.planning.search import _schedules
from raypp.job.load import parse_job
print(list(_schedules(parse_job({"name": "a"}), 2, 8)))
"""
    done = python_in(tree, "-c", code)
    assert "('pairs', 1)" in done.stdout, done.stderr


def test_kinds_are_known_without_an_import_of_their_files(tree: Path) -> None:
    code = """
import sys
from raypp.job.availability import CHOICES
from raypp.kinds import STORES
names = [choice.words() for choice in CHOICES.values()] + [STORES.names()]
print(sorted({"torch", "numpy", "boto3", "ray", "raypp.planning.schedules.pairs"} & set(sys.modules)), names)
"""
    done = python_in(tree, "-c", code)
    assert done.stdout.startswith("[] "), done.stdout + done.stderr
    assert "pairs" in done.stdout and "signs" in done.stdout


def installed(place: Path) -> Path:
    (place / "my_orders.py").write_text(SCHEDULE)
    (place / "my_optimizers.py").write_text("raise ImportError('planning needs no optimizer')\n")
    facts = place / "my_package-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text("[raypp.schedules]\nmine = my_orders\ngone = no_such_module\n")
    return place


@pytest.mark.parametrize("name", ["mine", "my_orders:build"])
def test_a_schedule_of_ones_own_package_is_taken_by_its_name_and_by_its_path(tmp_path: Path, name: str) -> None:
    place = installed(tmp_path)
    (place / "job.yaml").write_text(job_text(place, schedule=name, data="text", optimizer="adamw"))
    where = ("--set", f"checkpoint.url={place}/store")
    done = python_in(place, "-m", "raypp", "plan", "job.yaml", "--json", *where)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["program"][0].startswith("0F0 0F1 0B0 0B1")
    # The schedule declares that it supports one stage per rank, and that is checked.
    refused = python_in(place, "-m", "raypp", "plan", "job.yaml", *where, "--set", "pipeline.stages_per_rank=2")
    assert refused.returncode == 2
    assert f"{name} takes 1 per rank, not 2" in refused.stderr


def test_an_installed_kind_whose_module_is_gone_is_listed_and_refused(tmp_path: Path) -> None:
    place = installed(tmp_path)
    listed = json.loads(python_in(place, "-m", "raypp", "list-kinds", "pipeline.schedule", "--json").stdout)
    rows = {entry["name"]: entry for entry in listed["pipeline.schedule"]}
    assert rows["mine"]["available"] and rows["mine"]["summary"] == "two forwards, two backwards, in turn"
    assert rows["gone"] == {"name": "gone", "available": False, "summary": "cannot import no_such_module"}
    (place / "job.yaml").write_text(job_text(place, schedule="gone", data="synthetic", optimizer="adamw"))
    done = python_in(place, "-m", "raypp", "plan", "job.yaml", "--set", f"checkpoint.url={place}")
    assert done.returncode == 2 and "gone is not available" in done.stderr


def test_data_and_optimizers_of_ones_own_are_named_by_their_path_and_not_imported_to_plan(tmp_path: Path) -> None:
    place = installed(tmp_path)
    text = job_text(place, schedule="1f1b", data="text", optimizer="my_optimizers:build")
    (place / "job.yaml").write_text(text)
    where = ("--set", f"checkpoint.url={place}")
    assert python_in(place, "-m", "raypp", "plan", "job.yaml", *where).returncode == 0
    (place / "job.yaml").write_text(text.replace("my_optimizers", "my_optimisers"))
    done = python_in(place, "-m", "raypp", "plan", "job.yaml", *where)
    assert done.returncode == 2 and "train.optimizer.kind: cannot import 'my_optimisers'" in done.stderr
