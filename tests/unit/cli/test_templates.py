"""The example jobs: what their headers say holds, and `raypp plan` accepts them."""

from pathlib import Path

import click
import pytest
from gallery import NAMES, commands, settings, small

from raypp.api.checked_job import load_checked_job
from raypp.cli.job_commands import TEMPLATES
from raypp.cli.main import COMMANDS
from raypp.job.load import job_document
from raypp.planning.costs import device_named
from raypp.planning.machines import Machines
from raypp.planning.plan import Grounds, make_plan
from raypp.registry import load_object

REPOSITORY = Path(__file__).parents[3]
PLANS = [
    pytest.param(name, words, id=f"{name}-{words[words.index('--device') + 1]}")
    for name in NAMES
    for words in commands(name)
    if words[0] == "plan" and "--device" in words and "--links" not in words and "s3://" not in " ".join(words)
]


@pytest.fixture(autouse=True)
def own_modules_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `PYTHONPATH=.` does, which the headers of such jobs type."""
    monkeypatch.syspath_prepend(str(TEMPLATES))


def test_there_is_one_folder_of_jobs() -> None:
    assert len(NAMES) >= 12 and NAMES[0] == "quickstart"
    assert (REPOSITORY / "jobs").resolve() == TEMPLATES.resolve()


@pytest.mark.parametrize("name", NAMES)
def test_every_command_of_a_header_is_there_with_its_options(name: str) -> None:
    for words in commands(name):
        assert words[0] in COMMANDS
        command = load_object(COMMANDS[words[0]][0])
        if isinstance(command, click.Group):
            command = command.commands[words[1]]
        options = {one for param in command.params for one in param.opts}
        assert {word for word in words if word.startswith("--")} <= options, words
        if words[0] in ("submit", "plan", "parity", "doctor"):
            assert words[1] == f"{name}.yaml"


@pytest.mark.parametrize("name", NAMES)
def test_a_plan_accepts_the_job(name: str) -> None:
    job = load_checked_job(TEMPLATES / f"{name}.yaml").job
    assert job.name == name or name == "finetune-hf"
    assert make_plan(job).world == job.mesh.world


@pytest.mark.parametrize(("name", "words"), PLANS)
def test_a_job_fits_the_cards_that_its_header_plans_for(name: str, words: list[str]) -> None:
    def given(option: str) -> str | None:
        return words[words.index(option) + 1] if option in words else None

    job = load_checked_job(TEMPLATES / f"{name}.yaml", settings(words)).job
    per_node, gbps = given("--per-node"), given("--link-gbps")
    machines = Machines.alike(job.mesh.world, int(per_node or job.mesh.world // job.mesh.pp), float(gbps or 0) or None)
    device = device_named(given("--device") or "")
    (cast,) = make_plan(job, grounds=Grounds(machines=machines, device=device.name)).predictions
    assert (cast.peak_memory <= device.memory) != ("--fit" in words)
    assert len(machines.nodes) == 1 or gbps, "a job of several machines names their link"


@pytest.mark.parametrize("name", NAMES)
def test_the_small_twin_is_the_same_kind_of_job_for_four_cores(name: str) -> None:
    job = load_checked_job(TEMPLATES / f"{name}.yaml").job
    twin = load_checked_job(TEMPLATES / f"{name}.yaml", small(name)).job
    assert twin.name != job.name and twin.mesh.world <= 4 and twin.for_device("cpu").train.precision == "fp32"
    ours, theirs = job_document(job), job_document(twin)
    assert {axis for axis in ("pp", "dp_replicate", "cp", "ep") if job_axis(ours, axis)} == {
        axis for axis in ("pp", "dp_replicate", "cp", "ep") if job_axis(theirs, axis)
    }
    for key in ("kind", "from_hf", "tie_embeddings"):
        assert ours["model"][key] == theirs["model"][key]
    for section, key in (("pipeline", "schedule"), ("data", "kind"), ("recovery", "policy")):
        assert ours[section][key] == theirs[section][key]
    assert bool(job.recovery.elastic) == bool(twin.recovery.elastic)


def job_axis(document: dict[str, dict[str, int]], axis: str) -> bool:
    return document["mesh"][axis] > 1
