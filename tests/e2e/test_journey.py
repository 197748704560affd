"""One run goes through all that may happen to one, and ends like an undisturbed run."""

import json
import os
import signal
from dataclasses import dataclass

import psutil
import pytest
from held_back import held_back
from laptop import EVERY, REPOSITORY, STEPS, Answer, Laptop, Run
from listeners import Listener, listeners

pytestmark = pytest.mark.timeout(600)

NAME = "journey"


@dataclass
class Journey:
    """The run as first submitted, its ranks' processes by attempt, where the cluster listened while
    they trained, and the answers of `raypp stop` and, on one rank, of `raypp submit --resume`."""

    run: Run
    heard: set[Listener]
    pids: dict[int, list[int]]
    stopped: Answer
    resumed: Answer


@pytest.fixture(scope="module")
def journey(laptop: Laptop) -> Journey:
    """A rank is killed, then the controller, then the run is stopped, and resumed on one rank."""
    job = laptop.job(NAME)
    run = laptop.start(job, "--json")
    first = run.wait_seats(1)
    with held_back([rank.pid for rank in first.values()], pause_s=0.05):
        run.until(run.commits, "a commit")
    with held_back([rank.pid for rank in first.values()], pause_s=0.5):  # looking takes its time
        started = psutil.Process(laptop.state["ray"]["pid"]).children(recursive=True)
        heard = listeners([*laptop.processes(), *started])
        run.wait_step(EVERY + 2)
        first["pp1"].kill()
    second = run.wait_seats(2)
    controller = int(laptop.actors()[f"raypp/{NAME}"]["pid"])
    before = run.commits()[-1]
    # Right after a commit, when the last steps may exist only in the controller's memory.
    with held_back([rank.pid for rank in second.values()], pause_s=0.5):
        run.until(lambda: run.commits()[-1] > before, "another commit")
        os.kill(controller, signal.SIGKILL)
        stop = laptop.popen("stop", NAME)  # waits for the controller's next life
        run.until(lambda: run.events("stop_requested"), "the stop")
    out, err = stop.communicate(timeout=200)
    stopped = Answer(stop.returncode, out, err)
    run.wait()
    resumed = laptop.raypp("submit", str(job), "--resume", "--set", "mesh.pp=1", "--json")
    pids = {1: [first[label].pid for label in ("pp0", "pp1")], 2: [second[label].pid for label in ("pp0", "pp1")]}
    return Journey(run, heard, pids, stopped, resumed)


def test_a_killed_rank_is_reported_and_replaced_and_the_other_keeps_its_process(journey: Journey) -> None:
    failed = [event for event in journey.run.events("rank_failed") if event.details["kind"] != "lost_peer"]
    assert [(event.attempt, event.rank, event.details["kind"], event.details["pid"]) for event in failed] == [
        (1, 1, "killed", journey.pids[1][1])
    ]
    assert [one == other for one, other in zip(journey.pids[1], journey.pids[2], strict=True)] == [True, False]


def test_the_cluster_listens_on_loopback_only_and_asks_for_what_its_page_says(journey: Journey) -> None:
    assert {address for _, address, _ in journey.heard} == {"127.0.0.1"}
    page = (REPOSITORY / "docs" / "ports.md").read_text().partition("## On one machine")[2].partition("\n## ")[0]
    rows = [line.split("|")[1:-1] for line in page.splitlines() if line.startswith("|")][2:]
    said = {(name.strip(), asked.strip()) for name, _, asked in rows}
    first = {("dashboard", "nothing"), ("autoscaler", "nothing")}  # on fixed ports: if no other cluster has them
    assert first < said == first | {(name, asked) for name, _, asked in journey.heard if name != "prometheus"}


def test_a_killed_controller_finds_its_ranks_and_leads_them_on(journey: Journey) -> None:
    (restarted,) = journey.run.events("controller_restarted")
    assert restarted.details["pids"] == journey.pids[2]
    assert {row["attempt"] for row in journey.run.history()} == {1, 2, 3}, "the ranks took a step more than once"


def test_stop_saves_the_last_step_and_submit_ends_with_the_run(journey: Journey) -> None:
    assert journey.stopped.code == 0 and "STOPPED" in journey.stopped.out, journey.stopped
    assert journey.run.exit_code == 0, journey.run.describe()
    answer = json.loads(journey.run.out.splitlines()[-1])
    assert (answer["state"], answer["restarts"]) == ("STOPPED", 1)
    assert answer["checkpoint"] == f"s3://raypp/tests/{NAME}/step-{answer['step']:08d}"
    assert EVERY < answer["step"] < STEPS


def test_the_resumed_run_ends_bit_for_bit_like_an_undisturbed_one(journey: Journey, undisturbed: Run) -> None:
    assert journey.resumed.code == 0, journey.resumed
    assert (journey.resumed.json()["state"], journey.resumed.json()["step"]) == ("SUCCEEDED", STEPS)
    journey.run.assert_like(undisturbed)
    committed = [event.step for event in journey.run.events("committed")]
    assert committed == sorted(set(committed)), "a commit was reported twice"


def test_the_run_generates_the_text_of_the_undisturbed_one(laptop: Laptop, journey: Journey, undisturbed: Run) -> None:
    assert journey.resumed.code == 0, journey.resumed
    asked = ["--prompt", "In the beginning", "--max-new-tokens", "12", "--json"]
    alone = laptop.raypp("generate", "undisturbed", *asked)
    assert alone.code == 0 and [list(row) for row in alone.rows()] == [["prompt", "text", "tokens", "finish"]], alone
    assert laptop.raypp("generate", NAME, *asked, "--mesh", "pp=2").rows() == alone.rows()


def test_nothing_of_the_run_lives_on(laptop: Laptop, journey: Journey) -> None:
    laptop.assert_nothing_lives(NAME)
