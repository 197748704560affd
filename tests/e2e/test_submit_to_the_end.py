"""Tests one run through the command line, and all later queries from other processes."""

import json

import pytest
from laptop import EVERY, STEPS, Laptop, Run, copy_run

pytestmark = pytest.mark.timeout(600)

SUBMIT_KEYS = ["run", "state", "step", "loss", "tokens_per_s", "restarts", "checkpoint", "job_id", "address", "url"]
STATUS_KEYS = [
    *("run", "state", "step", "steps", "loss", "tokens_per_s", "attempt", "restarts", "checkpoint", "mesh", "ranks"),
    "error",
]
HISTORY_KEYS = ["step", "loss", "grad_norm", "tokens", "seq_len", "step_s", "tokens_per_s", "attempt"]


def test_the_last_line_of_submit_is_one_json_object_with_the_documented_keys(undisturbed: Run) -> None:
    assert undisturbed.exit_code == 0
    answer = json.loads(undisturbed.out.splitlines()[-1])
    assert list(answer) == SUBMIT_KEYS
    assert (answer["run"], answer["state"], answer["step"], answer["restarts"]) == (
        "undisturbed",
        "SUCCEEDED",
        STEPS,
        0,
    )
    assert answer["checkpoint"] == f"s3://raypp/tests/undisturbed/step-{STEPS:08d}"
    assert answer["tokens_per_s"] > 0


def test_ranks_actors_and_the_ray_job_carry_the_name_of_the_run(undisturbed: Run) -> None:
    seen = undisturbed.seen_alive
    assert seen["titles"] == ["ray::raypp/undisturbed/pp0", "ray::raypp/undisturbed/pp1"]
    assert seen["actors"] == ["raypp/undisturbed", "raypp/undisturbed/pp0", "raypp/undisturbed/pp1"]
    assert [job["submission_id"].startswith("raypp-undisturbed-") for job in seen["jobs"]] == [True]
    assert (seen["jobs"][0]["status"], seen["jobs"][0]["metadata"]["raypp_url"]) == ("RUNNING", "s3://raypp/tests")


def test_a_command_is_told_of_the_end(laptop: Laptop, undisturbed: Run) -> None:
    told = json.loads((laptop.directory / "told.json").read_text())
    assert (told["run"], told["state"], told["step"], told["exit_code"]) == ("undisturbed", "SUCCEEDED", STEPS, 0)
    assert told["report"] == "raypp report s3://raypp/tests/undisturbed"
    assert told["checkpoint"] == json.loads(undisturbed.out.splitlines()[-1])["checkpoint"]


def test_status_and_list_show_a_run_that_has_ended(laptop: Laptop, undisturbed: Run) -> None:
    status = laptop.raypp("status", "undisturbed", "--json").json()
    assert list(status) == STATUS_KEYS
    assert (status["state"], status["step"], status["steps"], status["attempt"]) == ("SUCCEEDED", STEPS, STEPS, 1)
    assert status["mesh"] == {"pp": 2, "dp_replicate": 1, "fsdp": 1, "cp": 1, "tp": 1, "ep": 1}
    assert [(rank["rank"], rank["coordinates"]["pp"], rank["state"]) for rank in status["ranks"]] == [
        (0, 0, "done"),
        (1, 1, "done"),
    ]
    assert [list(rank) for rank in status["ranks"]] == [["rank", "coordinates", "node", "pid", "state"]] * 2
    listed = {one["run"]: one for one in laptop.raypp("list", "--json").json()}
    assert listed["undisturbed"] == {key: value for key, value in status.items() if key != "ranks"} | {"waited_s": None}


def test_history_has_every_step_once_and_its_floats_lose_no_bit(laptop: Laptop, undisturbed: Run) -> None:
    answer = laptop.raypp("history", "undisturbed")
    rows = answer.rows()
    assert [list(row) for row in rows] == [HISTORY_KEYS] * STEPS
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert rows == undisturbed.history()
    assert [json.dumps(row) for row in rows] == answer.out.splitlines()
    assert rows[-1]["loss"] == json.loads(undisturbed.out.splitlines()[-1])["loss"] < rows[0]["loss"]


def test_events_and_logs_cover_every_rank(laptop: Laptop, undisturbed: Run) -> None:
    events = laptop.raypp("events", "undisturbed", "--json").json()
    assert {"time", "kind", "message", "attempt", "step", "rank", "node", "cause"} <= events[0].keys()
    kinds = [event["kind"] for event in events]
    assert kinds[:2] == ["submitted", "attempt_started"] and kinds[-1] == "succeeded"
    assert kinds.count("seated") == 2 and kinds.count("committed") == STEPS // EVERY
    assert [event["time"] for event in events] == sorted(event["time"] for event in events)
    assert {(event["rank"], event["node"]) for event in events if event["kind"] == "seated"} == {
        (0, "127.0.0.1"),
        (1, "127.0.0.1"),
    }
    lines = laptop.raypp("logs", "undisturbed").out.splitlines()
    tags = {line.partition("|")[0].strip() for line in lines}
    assert tags == {"pp0", "pp1"}
    only = laptop.raypp("logs", "undisturbed", "--rank", "1").out.splitlines()
    assert only and all(line.startswith("pp1") for line in only)


def test_the_checkpoints_kept_are_the_newest_and_every_byte_of_them_verifies(laptop: Laptop, undisturbed: Run) -> None:
    rows = laptop.raypp("checkpoints", "list", "undisturbed", "--json").json()
    assert [row["step"] for row in rows] == [STEPS - 2 * EVERY, STEPS - EVERY, STEPS]
    assert all(row["mesh"]["pp"] == 2 and row["objects"] == 2 and row["attempt"] == 1 for row in rows)
    verified = laptop.raypp("checkpoints", "verify", "undisturbed")
    assert verified.code == 0 and verified.out.count("intact") == 3, verified


@pytest.mark.slow
def test_a_run_whose_driver_takes_a_moment_to_leave_can_be_gone_on_with(laptop: Laptop, undisturbed: Run) -> None:
    """Covers the moment right after `raypp stop`: the records show the end before Ray does."""
    job = laptop.directory / "undisturbed.yaml"
    (before,) = [one for one in laptop.jobs() if one["metadata"]["raypp_run"] == "undisturbed"]
    lingering = {"raypp_run": "undisturbed", "raypp_url": before["metadata"]["raypp_url"]}
    laptop.dashboard.submit_job({"entrypoint": "sleep 8", "submission_id": "lingering", "metadata": lingering})
    answer = laptop.raypp("submit", str(job), "--resume", "--dry-run", "--set", f"train.steps={STEPS + 1}")
    assert answer.code == 0 and "nothing was started" in answer.out, answer
    status = laptop.dashboard.job("lingering")
    assert status is not None and status["status"] == "SUCCEEDED"  # the resume waited for the driver to exit


@pytest.mark.gate
def test_a_run_can_be_read_from_its_store_when_the_cluster_is_gone(laptop: Laptop, undisturbed: Run) -> None:
    place = laptop.directory / "copied"
    copy_run(laptop.store(), "undisturbed", place)
    elsewhere = {"RAYPP_HOME": str(laptop.directory / "another-home")}
    run = f"{place}/undisturbed"
    for command in (("status", run, "--json"), ("history", run), ("events", run, "--json"), ("logs", run)):
        here = laptop.raypp(command[0], "undisturbed", *command[2:])
        there = laptop.raypp(*command, environment=elsewhere)
        assert (there.code, there.out) == (here.code, here.out) and there.out, there
    assert laptop.raypp("checkpoints", "verify", run, environment=elsewhere).code == 0
    over_s3 = laptop.raypp("history", "s3://raypp/tests/undisturbed", environment=elsewhere | laptop.s3.environment())
    assert over_s3.rows() == undisturbed.history()
    unknown = laptop.raypp("status", "undisturbed", environment=elsewhere)
    assert unknown.code == 2 and "URL/NAME" in unknown.err


@pytest.mark.gate
def test_doctor_tries_the_store_with_the_keys_of_the_embedded_cluster(laptop: Laptop) -> None:
    answer = laptop.raypp("doctor", str(laptop.job("examined")), "--no-devices", "--json")
    assert answer.code == 0, answer.err
    report = json.loads(answer.out.splitlines()[-1])
    assert ["error" in node for node in report["store"]["nodes"]] == [False]
    assert not [one for one in report["findings"] if one["severity"] in ("breaks", "exposes")]
