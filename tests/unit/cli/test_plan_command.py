"""`raypp plan` with machines and costs, and its search."""

import json
from pathlib import Path

import pytest

from raypp.api.checked_job import plan
from raypp.cli.console import Console
from raypp.cli.main import run
from raypp.cli.plan_view import plan_view
from raypp.job.job_file import load_job
from raypp.planning.costs import Costs, Part
from raypp.planning.measured_costs import write_costs

REPOSITORY = Path(__file__).parents[3]
QUICKSTART = str(REPOSITORY / "jobs" / "quickstart.yaml")
pytestmark = pytest.mark.usefixtures("in_the_repository")


@pytest.fixture
def costs(tmp_path: Path) -> str:
    path = tmp_path / "costs.json"
    found = Costs(Part(0.01, 0.02), Part(0.0, 0.001), Part(0.002, 0.004), 1e-9, 0.003)
    write_costs(path, found, load_job(QUICKSTART).job, "a core", "fp32", "today")
    return str(path)


@pytest.fixture
def links(tmp_path: Path) -> str:
    path = tmp_path / "links.json"
    devices = [{"node": node, "kind": "cpu"} for node in ("a", "a", "b", "b")]
    found = [{"from": "a", "to": "b", "gbps": 0.05, "latency_ms": 0.2}]
    path.write_text(json.dumps({"nodes": ["a", "b"], "devices": devices, "links": found, "measured": "today"}))
    return str(path)


def test_measured_costs_and_links_are_used_and_named(
    capsys: pytest.CaptureFixture[str], costs: str, links: str
) -> None:
    assert run(["plan", QUICKSTART, "--costs", costs, "--links", links, "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["predictions"]
    assert found["device"] == "measured" and sorted(found["measured"]) == ["costs", "links"]
    assert [link["nodes"] for link in found["links"]] == [["a", "b"]]
    assert found["step_s"] == pytest.approx(sum(found["parts"].values()))


def test_played_steps_are_shown_beside_the_plan_with_whether_they_fit(capsys: pytest.CaptureFixture[str]) -> None:
    job, gib = load_job(QUICKSTART).job, 2**30
    row = {"pp": 0, "planned": 11 * gib, "played": 10 * gib, "at": "0B1", "rest": 2 * gib, "total": 12 * gib}
    for total, said in ((12, "fits: a rank needs 12 GiB"), (30, "does not fit: a rank needs 30 GiB")):
        rows = [{**row, "total": total * gib}]
        Console(width=80).print(plan_view(job, plan(job, device="rtx4090"), 80, rows))
        printed = " ".join(capsys.readouterr().out.split())
        assert "+10.0% 0B1" in printed and said in printed


def test_the_search_prints_settings_that_give_the_job_it_ranks(
    capsys: pytest.CaptureFixture[str], costs: str, links: str
) -> None:
    search = ["plan", QUICKSTART, "--costs", costs, "--links", links, "--search", "--search-time", "30"]
    assert run([*search, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    best = found["best"][0]
    settings = [word for setting in best["settings"] for word in ("--set", setting)]
    assert run(["plan", QUICKSTART, "--costs", costs, "--links", links, "--json", *settings]) == 0
    (again,) = json.loads(capsys.readouterr().out)["predictions"]
    assert again["step_s"] == pytest.approx(best["step_s"], rel=1e-6)
    assert [one["step_s"] for one in found["best"]] == sorted(one["step_s"] for one in found["best"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--device", "abacus"], "one of cpu, cuda"),
        (["--links", "/nowhere/links.json"], "does not exist"),
        (["--costs", "/nowhere/costs.json"], "raypp plan JOB --measure"),
        (["--costs", "a.json", "--measure", "b.json"], "use only one of them"),
        (["--exact", "--search"], "--exact and --search do not go together"),
        (["--exact", "--set", "resources.device=cpu"], "plan for a GPU: --set resources.device=cuda"),
        (["--fit"], "add --device with one of rtx3090, rtx4090"),
        (["--fit", "--device", "h100", "--search"], "leave out --search"),
        (["--fit", "--device", "h100", "--costs", "a.json"], "leave out --costs"),
        (["--fit", "--device", "rtx4900"], "did you mean rtx4090?"),
    ],
)
def test_what_cannot_be_used_is_refused_with_a_way_out(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert run(["plan", QUICKSTART, *arguments]) == 2
    printed = capsys.readouterr().err
    assert said in printed and "Traceback" not in printed


def test_more_ranks_than_the_cluster_has_devices_are_refused(capsys: pytest.CaptureFixture[str], links: str) -> None:
    assert run(["plan", QUICKSTART, "--links", links, "--set", "mesh.fsdp=4"]) == 4
    assert "8 ranks do not fit on 4 devices" in capsys.readouterr().err


LARGER = ["--set", "data.seq_len=65536", "--set", "train.micro_batch_size=8", "--set", "model.num_layers=8"]
LARGER += ["--set", "mesh.fsdp=1"]
CARD = ["--device", "RTX 4090", "--link-gbps", "1"]


def test_what_does_not_fit_gets_words_to_paste_that_make_it_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", QUICKSTART, *CARD, *LARGER, "--fit"]) == 0
    printed = capsys.readouterr().out
    assert "does not fit on 2 × rtx4090" in printed and "fastest first" in printed
    (_, *lines) = printed.split("fastest first:\n")[1].splitlines()
    typed = lines[0].split()
    assert typed[0] == "--set"
    assert run(["plan", QUICKSTART, *CARD, *LARGER, *typed, "--fit"]) == 0
    assert "already fits" in capsys.readouterr().out


@pytest.mark.parametrize("key", ["data.path", "data.eval.path"])
@pytest.mark.parametrize(("name", "fix"), [("my.csv", "write JSON lines"), ("my.jsonl", "set data.kind to jsonl")])
def test_a_plan_refuses_a_file_of_another_kind(
    key: str, name: str, fix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text("a,b\n1,2\n" * 100)
    assert run(["plan", str(REPOSITORY / "jobs/quickstart.yaml"), "--set", f"{key}={tmp_path / name}"]) == 2
    error = capsys.readouterr().err
    assert key in error and f"{name} is {Path(name).suffix}" in error and fix in error
