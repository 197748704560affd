"""Runs that wait for devices, on a real Ray: order, places, a leader that dies, a cancelled run."""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import raypp
from raypp.api.queue import cancel_waiting, move, queue
from raypp.api.submission import Queued
from raypp.control import client
from raypp.control.clusters.find import Cluster
from raypp.control.clusters.known_runs import RunPlace
from raypp.control.queue.client import hold, pause
from raypp.control.queue.line import Need, Priority
from raypp.control.queue.ticket import Ticket, waited_s, write_ticket
from raypp.errors import JobError, ResourcesError
from raypp.job.load import job_document, parse_job
from raypp.retry import Backoff
from raypp.state.checkpoint.run_spec import read_end, write_spec
from raypp.state.run_records.reader import RunReader
from raypp.storage import open_store
from tests.ray.conftest import Started, StartRun
from tests.ray.extra_nodes import ExtraNodes


class Waiter:
    """A run that was put into the line, and a thread that follows its place."""

    def __init__(
        self, cluster: Cluster, folder: Path, name: str, cpus: int, priority: Priority, user: str, after: str = "",
        steps: int = 5, hold: int = 0, ranks: int = 1, seconds: float | None = None, step_s: float = 0.05,
        **recovery: Any,
    ) -> None:  # fmt: skip
        environment = {"STAND_IN_DIR": str(folder / name), "STAND_IN_HOLD": f"{hold}:1", "STAND_IN_STEP_S": str(step_s)}
        job = parse_job(
            {
                "name": name,
                "mesh": {"fsdp": ranks},
                "train": {"steps": steps},
                "checkpoint": {"url": str(folder / "store"), "every_steps": 5},
                "resources": {"env": environment, "cpus_per_rank": cpus, "device": "cpu"},
                "recovery": {"standby": False, **recovery},
            }
        )
        self.store = open_store(job.checkpoint.url)
        others = (f"{self.store.url}/{after}",) if after else ()
        document = client.ray_job(
            job, cluster, self.store.url, rank_function="stand_in:run_rank", number=1, user=user, later=True,
            priority=priority, after=others,
        )  # fmt: skip
        need = Need(ranks, float(cpus))
        ticket = Ticket(name, self.store.url, 1, user, priority, need, seconds, document, after=others)
        write_spec(self.store, name, job_document(job))
        ticket = write_ticket(self.store, ticket)
        self.place = RunPlace(self.store.url, name, cluster.address, ticket.submission_id, time.time())
        self.told: list[dict[str, Any]] = []
        self.queued = Queued(cluster, ticket, self.place)
        (first,) = self.queued.follow(print, detach=True)
        self.told.append(first)

    def follow(self) -> threading.Thread:
        thread = threading.Thread(target=lambda: self.told.extend(self.queued.follow(print)), daemon=True)
        thread.start()
        return thread


def leaders(cluster: Cluster) -> list[int]:
    actors = cluster.dashboard.get_json("/api/v0/actors?detail=1&limit=1000")["data"]["result"]["result"]
    return [one["pid"] for one in actors if one["name"] == "raypp/queue" and one["state"] == "ALIVE"]


def hold_cpus(start_run: StartRun, name: str, cpus: int) -> Started:
    """Starts a run that has so many of the cluster's 16 CPUs until it is let go."""
    run = start_run(
        name, steps=20, hold=15, mesh={"pp": 1}, resources={"cpus_per_rank": cpus}, recovery={"standby": False}
    )
    run.wait_step(14)
    return run


@pytest.mark.gate
@pytest.mark.timeout(600)  # a Ray job for each question to the line
def test_runs_wait_in_order_and_start_in_turn_though_the_leader_dies(
    cluster: Cluster, start_run: StartRun, tmp_path: Path
) -> None:
    first = hold_cpus(start_run, "first", 10)
    late = Waiter(cluster, tmp_path, "late", 10, "low", "ann", after="large")
    large = Waiter(cluster, tmp_path, "large", 16, "normal", "bob")
    small = Waiter(cluster, tmp_path, "small", 8, "high", "cem")
    job = parse_job({"name": "gone", "data": {"kind": "synthetic"}, "resources": {"cpus_per_rank": 16}})
    job = job.model_copy(update={"checkpoint": job.checkpoint.model_copy(update={"url": large.store.url})})
    with pytest.raises(ResourcesError, match="0 are free"):
        raypp.submit(job, address=cluster.address, now=True)
    gone = raypp.submit(job, address=cluster.address, user="ann")
    assert [one.told[0]["place"] for one in (late, large, small)] == [1, 1, 1]
    assert small.told[0]["held"] == ["first has 10 CPU"]
    line = gone.queued()
    assert line is not None and (line["place"], line["before"], line["user"]) == (3, ["small", "large"], "ann")
    assert (gone.status()["state"], "waits in the line" in gone.status()["error"]) == ("PENDING", True)
    with pytest.raises(JobError, match="late has priority low and would pass large"):
        move("late", "large", cluster.address)
    move("gone", "large", cluster.address)
    shown = queue(cluster.address)
    assert [(one["run"], one["user"]) for one in shown["waiting"]] == [
        ("small", "cem"), ("gone", "ann"), ("large", "bob"), ("late", "ann"),
    ]  # fmt: skip
    assert [(one["run"], one["cpus"]) for one in shown["running"]] == [("first", 10)]
    with pytest.raises(JobError, match="first does not wait"):
        cancel_waiting("first", cluster.address)
    assert cancel_waiting("gone", cluster.address)["kept"] == ""
    assert large.store.head("gone/spec.json") is None
    with pytest.raises(JobError, match=r"no node elsewhere\n.*it has 127\.0\.0\.1 \("):
        hold(cluster, "elsewhere", "bob")
    assert not pause(cluster, "ann")
    (leader,) = leaders(cluster)
    following = [small.follow(), large.follow()]
    os.kill(leader, signal.SIGKILL)
    first.let_go()
    first.wait(lambda: first.job()["status"] == "SUCCEEDED", "the end of the first run")
    assert hold(cluster, "127.0.0.1", "bob", 4e9) == ["127.0.0.1"] and pause(cluster, None)
    shown = queue(cluster.address)
    assert [one["run"] for one in shown["waiting"]] == ["small", "large", "late"] and not shown["running"]
    assert [(one["node"], one["user"]) for one in shown["rules"]] == [("127.0.0.1", "bob")]
    assert (shown["waiting"][0]["expected_start"], "0 are free" in shown["why"]) == (4e9, True)
    assert (shown["waiting"][2]["expected_start"], shown["waiting"][2]["after"]) == (None, [f"{late.store.url}/large"])
    hold(cluster, "127.0.0.1", None)
    for waiter in (small, large, late):
        reader = RunReader(waiter.store, waiter.place.name)
        first.wait(lambda reader=reader: (reader.status() or {}).get("state") == "SUCCEEDED", waiter.place.name)
    begun = [RunReader(one.store, one.place.name).events()[0].time for one in (small, large, late)]
    assert begun == sorted(begun)
    assert waited_s(late.store, "late") >= waited_s(small.store, "small") > 0
    assert raypp.run(f"{late.store.url}/late").queued() is None
    for thread in following:
        thread.join(60)
    Waiter(cluster, tmp_path, "never", 1, "high", "ann", after="gone")
    first.wait(lambda: read_end(late.store, "never") is not None, "the end of a run after a cancelled one")
    never = read_end(late.store, "never")
    assert never is not None and never.reason.startswith("gone had to succeed before, and has no recorded end; `")
    assert small.told[-1] == {"state": "started"} and large.told[-1] == {"state": "started"}
    first.wait(lambda: not leaders(cluster), "the leader's end, with nothing in the line")
    assert queue(cluster.address)["waiting"] == []


@pytest.mark.slow
@pytest.mark.gate
@pytest.mark.timeout(600)
def test_runs_make_room_for_one_of_higher_priority_first_by_shrinking_and_go_on_where_they_were(
    cluster: Cluster, start_run: StartRun, tmp_path: Path
) -> None:
    more: dict[str, Any] = {"steps": 100_000, "resources": {"cpus_per_rank": 1}}
    wide = start_run("wide", mesh={"fsdp": 8}, recovery={"elastic": {"min_ranks": 4}, "standby": False}, **more)
    wide.wait_step(3)
    more["resources"] = {"cpus_per_rank": 8}
    whole = start_run("whole", mesh={"pp": 1}, recovery={"preemptible": True, "standby": False}, **more)
    whole.wait_step(3)
    small = Waiter(cluster, tmp_path, "small", 4, "high", "ann", steps=20, hold=20)
    whole.wait(lambda: (RunReader(small.store, "small").status() or {}).get("step", 0) >= 10, "the small run")
    assert "room_asked" not in whole.kinds() and wide.event("room_asked").message == (
        "small, of priority high, needs 1 × 4 CPU; this run saves, and goes on with fewer ranks"
    )
    large = Waiter(cluster, tmp_path, "large", 8, "high", "bob", steps=20, hold=20)
    whole.wait(lambda: (RunReader(large.store, "large").status() or {}).get("step", 0) >= 10, "the large run")
    waits = raypp.run(f"{whole.url}/whole").queued()
    assert waits is not None and (waits["place"], waits["needs"]) == (1, "1 × 8 CPU")
    assert (whole.status()["state"], "waits in the line" in whole.status()["error"]) == ("PENDING", True)
    with pytest.raises(JobError, match=r"whole has begun, and waits because it gave way\n.*raypp stop whole"):
        cancel_waiting(f"{whole.url}/whole", cluster.address)
    os.kill(whole.controller(), signal.SIGKILL)
    (leader,) = leaders(cluster)
    os.kill(leader, signal.SIGKILL)
    for waiter in (small, large):
        (tmp_path / waiter.place.name / "go").touch()
    whole.wait_attempt(2)
    assert (waited_s(open_store(whole.url), "whole") or 0.0) > 0.0
    wide.wait(lambda: len(wide.status()["ranks"]) == 8 and wide.status()["attempt"] == 3, "its whole mesh again")
    for run in (whole, wide):
        step = run.status()["step"]
        run.wait_step(step + 3)
        assert run.stop()["state"] == "STOPPED" and run.status()["restarts"] == 0
        assert [step for _, step in run.taken()] == list(range(1, len(run.taken()) + 1)), "no step is taken twice"
    whole.wait(lambda: not leaders(cluster), "the leader's end, with nothing in the line")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_of_the_line_starts_beside_a_held_node_and_on_it_after_its_release(
    cluster: Cluster, nodes: ExtraNodes, tmp_path: Path
) -> None:
    """Each node has room for two of these runs, and the head for none."""
    held, other = (node.address for node in nodes.add(71, 72))
    patience = Backoff(200, first_s=0.2, longest_s=0.2)
    assert patience.wait(lambda: {held, other} <= {node.ip for node in cluster.dashboard.nodes()})
    assert hold(cluster, held, "ann") == [held]
    runs = [Waiter(cluster, tmp_path, name, 20, "normal", "bob", steps=40, hold=20) for name in ("x", "y", "z")]

    def where(waiter: Waiter) -> list[str]:
        status = RunReader(waiter.store, waiter.place.name).status() or {}
        return [rank["node"] for rank in status.get("ranks", ()) if status.get("step", 0) >= 10]

    assert patience.wait(lambda: all(where(one) for one in runs[:2]))
    assert [where(one) for one in runs] == [[other], [other], []]
    shown = queue(cluster.address)
    assert [one["run"] for one in shown["waiting"]] == ["z"] and "0 are free" in shown["why"]
    hold(cluster, held, None)
    assert patience.wait(lambda: bool(where(runs[2]))) and where(runs[2]) == [held]
    for waiter in runs:
        (tmp_path / waiter.place.name / "go").touch()
    assert patience.wait(lambda: all(read_end(one.store, one.place.name) for one in runs))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_twenty_runs_of_four_users_have_their_turns_and_their_numbers_though_leaders_die(
    cluster: Cluster, start_run: StartRun, tmp_path: Path
) -> None:
    """Some can give way, and six of higher priority come later. Prints how busy the CPUs were while
    something waited."""
    first = hold_cpus(start_run, "all", 16)
    sizes, users, waiters = (1, 2, 4, 8, 16), "abcd", dict[str, Waiter]()
    steps = {f"r{n:02}": 720 if n == 0 else 96 for n in range(20)}

    def submit(n: int, priority: Priority) -> None:
        size, more = sizes[n % 5], dict[str, Any]()
        if size in (4, 8):  # of many ranks
            more = {"ranks": size, "elastic": {"min_ranks": size // 2, "grace_s": 600}}
        name, cpus = f"r{n:02}", size // more.get("ranks", 1)
        waiters[name] = Waiter(
            cluster, tmp_path, name, cpus, priority, users[n % 4], steps=steps[name], seconds=steps[name] * 0.55,
            step_s=0.5, preemptible=n != 2, **more,
        )  # fmt: skip

    for n in range(14):
        submit(n, ("normal", "low")[n % 2])
    line = [row["run"] for row in queue(cluster.address)["waiting"]]
    assert line == [f"r{n:02}" for part in (0, 1) for n in range(14) if n % 2 == part]
    first.let_go()
    killed, began, ends, asked, busy, useful = 0, time.monotonic(), dict[str, Any](), 0, 0.0, 0.0
    while len(ends) < 20:
        groups = cluster.dashboard.get_json("/api/v0/placement_groups?detail=1&limit=1000")["data"]["result"]["result"]
        groups = [group for group in groups if group["state"] != "REMOVED"]  # a run that gave way has one of them, too
        states = {group["name"].partition(".")[0].removeprefix("raypp/"): group["state"] for group in groups}
        assert list(states.values()).count("PENDING") <= 1
        held = [group for group in groups if group["state"] == "CREATED" and group["name"].startswith("raypp/r")]
        cpus = sum(bundle["unit_resources"]["CPU"] for group in held for bundle in group["bundles"])
        waits = [name for name in waiters if name not in ends and states.get(name) != "CREATED"]
        if waits:
            fits = any(sizes[int(name[1:]) % 5] <= 16 - cpus for name in waits)
            asked, busy, useful = asked + 1, busy + cpus / 16, useful + (cpus / 16 if fits else 1.0)
        ends |= {name: end for name, one in waiters.items() if (end := read_end(one.store, name)) is not None}
        if len(ends) >= 5 * (killed + 1) and killed < 3 and (pids := leaders(cluster)):
            os.kill(pids[0], signal.SIGKILL)
            killed += 1
        if len(ends) >= 3 and len(waiters) == 14:
            for n in range(14, 20):
                submit(n, "high")
        time.sleep(0.2)
    print(
        f"{busy / asked:.0%} of the CPUs were held while runs waited; {useful / asked:.0%} were held or of no use to "
        f"any run that waited; {time.monotonic() - began:.0f} s, {killed} kills"
    )
    assert {end.state for end in ends.values()} == {"SUCCEEDED"} and killed == 3
    readers = {name: RunReader(one.store, name) for name, one in waiters.items()}
    for name, reader in readers.items():
        assert [row["loss"] for row in reader.history()] == [1.0 / step for step in range(1, steps[name] + 1)]
        assert (reader.status() or {})["restarts"] == 0
    asked_runs = {name for name, one in readers.items() if any(event.kind == "room_asked" for event in one.events())}
    print(f"room was asked of {', '.join(sorted(asked_runs))}")
    assert asked_runs and not asked_runs & {f"r{n}" for n in range(14, 20)}
