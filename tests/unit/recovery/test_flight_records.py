"""Torch's flight records say where ranks stand; nodes are left out by their pairs."""

import json
from typing import Any

import pytest

from raypp.control.node_test import failing_nodes, ring_rounds
from raypp.control.recovery.hang_analysis import WITHOUT, pending, stuck_collectives

LABELS = {rank: f"pp0-fsdp{rank}" for rank in range(3)}


def entry(number: int, state: str, name: str = "nccl:_all_gather_base", group: tuple[str, str] = ("3", "fsdp")) -> Any:
    """Returns an entry as torch 2.11 to 2.13 write it."""
    p2p = "send" in name or "recv" in name
    return {
        "record_id": number, "pg_id": 1, "process_group": list(group), "collective_seq_id": 0 if p2p else number,
        "p2p_seq_id": number if p2p else 0, "op_id": number, "profiling_name": name, "is_p2p": p2p, "state": state,
        "input_sizes": [[3]], "output_sizes": [[3]], "input_dtypes": ["Float"], "output_dtypes": ["Float"],
        "time_created_ns": 1795910686793312690, "time_discovered_started_ns": 0, "retired": state == "completed",
        "time_discovered_completed_ns": 0, "timeout_ms": 600000, "thread_id": "1", "thread_name": "rank",
    }  # fmt: skip


def record(*entries: Any, ranks: str = "[0, 1, 2]") -> str:
    config = {"3": {"name": "3", "desc": "fsdp", "ranks": ranks}}
    return json.dumps({"version": "2.10", "pg_config": config, "pg_status": {}, "entries": list(entries)})


def test_the_communicator_is_named_with_who_has_started_and_who_has_not() -> None:
    records = {
        0: record(entry(7, "completed"), entry(8, "started"), entry(9, "scheduled")),
        1: record(entry(7, "completed"), entry(8, "scheduled")),
        2: record(entry(7, "completed")),
    }
    assert stuck_collectives(records, LABELS) == [
        "nccl:_all_gather_base 8 of communicator fsdp (group 3): started by pp0-fsdp0; only queued by pp0-fsdp1; not "
        "queued by pp0-fsdp2"
    ]
    assert [one["collective_seq_id"] for one in pending(records[0])] == [8, 9]


def test_a_rank_that_is_further_has_done_it_and_one_without_a_record_is_named() -> None:
    records = {0: record(entry(8, "started")), 1: record(entry(2000, "completed"))}
    first, second = stuck_collectives(records, LABELS)
    assert first.endswith("(group 3): started by pp0-fsdp0; not queued by pp0-fsdp2; done by pp0-fsdp1")
    assert second == "no flight record of pp0-fsdp2"


def test_messages_are_reported_by_their_ends() -> None:
    waits = [entry(4, "started", "nccl:recv 1<-0", ("5", "pp")), entry(5, "scheduled", "nccl:send 1->0", ("5", "pp"))]
    assert stuck_collectives({0: record(), 1: record(*waits), 2: record()}, LABELS) == [
        "pp0-fsdp1: nccl:recv 1<-0 in pp, started",
        "pp0-fsdp1: nccl:send 1->0 in pp, only queued",
    ]


def test_what_gloo_records_has_begun_where_it_is_not_retired() -> None:
    def own(retired: bool) -> str:
        """Returns a record of torch 2.13 for CPUs, in fields that count."""
        one = entry(2, "scheduled", "gloo:all_reduce", ("0", "default_pg")) | {"retired": retired}
        return json.dumps({"entries": [one], "pg_config": {"": {"desc": "", "name": "", "ranks": "[]"}}})

    (line,) = stuck_collectives({0: own(False), 1: own(True)}, {0: "a", 1: "b"})
    assert line == "gloo:all_reduce 2 of communicator default_pg (group 0): started by a; done by b"


@pytest.mark.parametrize(
    ("records", "said"),
    [
        ({0: "", 1: ""}, WITHOUT),
        ({}, "no rank gave its flight record"),
        (dict.fromkeys(range(3), "no JSON"), "no operation that is not completed"),
        (dict.fromkeys(range(3), '{"entries": [{"state": "new"}]}'), "None 0 of communicator unnamed (group ?)"),
    ],
    ids=["built without", "no answer", "damaged", "another format"],
)
def test_records_that_say_nothing_are_reported_as_such(records: dict[int, str], said: str) -> None:
    assert said in stuck_collectives(records, LABELS)[0]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 9])
def test_every_node_is_tested_with_two_others_in_at_most_three_rounds(count: int) -> None:
    rounds = ring_rounds([f"n{place}" for place in range(count)])
    assert len(rounds) <= 3
    assert all(len({node for pair in pairs for node in pair}) == 2 * len(pairs) for pairs in rounds)
    tested = [node for pairs in rounds for pair in pairs for node in pair]
    assert all(tested.count(f"n{place}") == min(2, count - 1) for place in range(count))


@pytest.mark.parametrize("count", [3, 4, 5, 9])
@pytest.mark.parametrize("bad", [0, 2])
def test_the_node_whose_pairs_all_fail_is_left_out(count: int, bad: int) -> None:
    pairs = [pair for pairs in ring_rounds([f"n{place}" for place in range(count)]) for pair in pairs]
    found = failing_nodes({}, {pair: "hangs" if f"n{bad}" in pair else "" for pair in pairs})
    assert list(found) == [f"n{bad}"] and found[f"n{bad}"].endswith(": hangs")


def test_nobody_is_left_out_where_the_culprit_is_unknown() -> None:
    assert failing_nodes({}, {("a", "b"): "hangs"}) == {}
    assert failing_nodes({"a": "", "b": ""}, {("a", "b"): ""}) == {}
    everything = [pair for pairs in ring_rounds(["a", "b", "c", "d"]) for pair in pairs]
    assert failing_nodes({}, dict.fromkeys(everything, "hangs")) == {}
    assert failing_nodes({"a": "wrong numbers", "b": ""}, {}) == {"a": "its own ranks: wrong numbers"}
