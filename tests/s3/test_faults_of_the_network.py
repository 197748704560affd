"""Saves and loads while the network to a real server drops, delays, corrupts or refuses data."""

import random
import threading
import time
from collections.abc import Callable

import pytest
from fault_proxy import FaultProxy, Request, asks
from saving import PART, OneRank, newest, saved, store_at

from raypp.control.clusters.seaweed import SeaweedServer
from raypp.errors import CheckpointError
from raypp.state.checkpoint.commit import claim_attempt
from raypp.state.checkpoint.layout import commit_key, rank_key
from raypp.storage import AlreadyExists, ServerNotThere, StoreError
from raypp.storage.s3 import S3Store
from raypp.storage.store import Patience

PATIENT = Patience(30.0, 30.0)
HASTY = Patience(1.5, 1.5)


def opened(
    place: FaultProxy | SeaweedServer, server: SeaweedServer, patience: Patience = PATIENT, timeout_s: float = 20.0
) -> S3Store:
    return store_at(place, server, "faults", part_bytes=PART, patience=patience, timeout_s=timeout_s)


@pytest.fixture
def store(proxy: FaultProxy, seaweed_server: SeaweedServer) -> S3Store:
    return opened(proxy, seaweed_server)


@pytest.fixture
def beside(seaweed_server: SeaweedServer) -> S3Store:
    """A store with the same objects that bypasses the proxy."""
    return opened(seaweed_server, seaweed_server)


is_put, is_part, is_commit = asks("PUT"), asks("PUT", "partNumber="), asks("PUT", "/COMMIT")
is_completion, is_read_of_data = asks("POST", "uploadId="), asks("GET", ".safetensors")


def some(share: float, seed: int = 0) -> Callable[[Request], bool]:
    chance = random.Random(seed)
    return lambda _request: chance.random() < share


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (503, "SlowDown"),
        pytest.param(500, "InternalError", marks=pytest.mark.slow),
        pytest.param(429, "TooManyRequests", marks=pytest.mark.slow),
    ],
)
def test_a_storm_of_refusals_delays_saves_and_loads_and_fails_neither(
    status: int, code: str, proxy: FaultProxy, store: S3Store, run: str
) -> None:
    storm = proxy.add(some(0.4), times=None, status=status, code=code)
    rank = saved(store, run, 1)
    assert rank.loads(store, 1)
    assert storm.hits >= 3


@pytest.mark.gate
def test_a_storm_that_does_not_end_fails_the_save_in_words_and_the_older_checkpoint_stays(
    proxy: FaultProxy, seaweed_server: SeaweedServer, beside: S3Store, run: str
) -> None:
    rank = saved(opened(proxy, seaweed_server, HASTY), run, 1)
    storm = proxy.add(is_put, times=None, status=503, code="SlowDown")
    rank.save(2)
    while storm.hits < 3:
        time.sleep(0.05)
    rank.saver.close()
    assert rank.saver.wait() == 1
    proxy.clear()
    assert newest(beside, run) == (1, [])
    with pytest.raises(StoreError, match=r"503 SlowDown.*tried \d+ times in \d+ s"):
        proxy.add(is_put, times=None, status=503, code="SlowDown")
        opened(proxy, seaweed_server, HASTY).put("a", b"1")


@pytest.mark.gate
@pytest.mark.parametrize("at", [pytest.param(0, marks=pytest.mark.slow), 1000])
def test_uploads_go_on_after_connections_are_reset_in_the_middle(
    at: int, proxy: FaultProxy, store: S3Store, run: str
) -> None:
    cut = proxy.add(is_part, times=3, cut_request_at=at)
    rank = saved(store, run, 1)
    assert cut.hits == 3
    assert rank.loads(store, 1)
    assert newest(store, run) == (1, [])


@pytest.mark.gate
@pytest.mark.parametrize("how", ["cut_answer_at", "end_answer_at"])
def test_a_load_reads_again_what_came_in_part_only(how: str, proxy: FaultProxy, store: S3Store, run: str) -> None:
    rank = saved(store, run, 1)
    cut = proxy.add(is_read_of_data, times=3, **{how: 100})
    assert rank.loads(store, 1)
    assert cut.hits == 3


@pytest.mark.slow
def test_a_body_that_never_comes_whole_is_reported_with_the_objects_name(
    proxy: FaultProxy, store: S3Store, seaweed_server: SeaweedServer, run: str
) -> None:
    rank = saved(store, run, 1)
    proxy.add(is_read_of_data, times=None, end_answer_at=10)
    with pytest.raises(StoreError, match=r"rank-00000\.safetensors: was cut off in transit"):
        rank.loads(opened(proxy, seaweed_server, HASTY), 1)


@pytest.mark.gate
def test_a_byte_flipped_on_the_way_to_a_reader_is_read_again_and_costs_no_checkpoint(
    proxy: FaultProxy, store: S3Store, run: str
) -> None:
    rank = saved(store, run, 1)
    for at in (3, 70_000):
        flip = proxy.add(is_read_of_data, times=1, flip_answer_at=at)
        assert rank.loads(store, 1)
        assert flip.hits == 1
    proxy.add(is_read_of_data, times=1, flip_answer_at=70_000)
    assert newest(store, run) == (1, [])


@pytest.mark.gate
def test_a_byte_flipped_on_the_way_to_the_server_is_sent_again(proxy: FaultProxy, store: S3Store, run: str) -> None:
    """This server compares a part with the checksum that is sent along, not with its signature."""
    assert store.sums.compared()
    flip = proxy.add(is_part, times=2, flip_request_at=12_345)
    saved(store, run, 1)
    assert flip.hits == 2
    assert newest(store, run) == (1, [])


@pytest.mark.parametrize(
    "lost",
    [*(pytest.param(one, marks=pytest.mark.gate) for one in (is_part, is_completion)), is_commit],
    ids=["upload", "completion", "commit"],
)
def test_a_lost_answer_is_no_lost_save(
    lost: Callable[[Request], bool], proxy: FaultProxy, store: S3Store, run: str
) -> None:
    rank = OneRank(store, run)
    fault = proxy.add(lost, lose_answer=True)
    assert rank.save_and_wait(1), rank.failures()
    assert fault.hits == 1
    assert rank.loads(store, 1)
    assert list(store.unfinished(run)) == []


@pytest.mark.gate
def test_a_conditional_write_whose_answer_was_lost_counts_as_ours_and_only_ours(
    proxy: FaultProxy, store: S3Store, run: str
) -> None:
    proxy.add(lambda request: "if-none-match" in request.headers and "/attempts/" in request.target, lose_answer=True)
    claim_attempt(store, run, 1)
    with pytest.raises(AlreadyExists):
        claim_attempt(store, run, 1)


@pytest.mark.slow
def test_a_server_that_falls_silent_is_asked_again_after_the_time_limit(
    proxy: FaultProxy, seaweed_server: SeaweedServer, run: str
) -> None:
    store = opened(proxy, seaweed_server, timeout_s=1.0)
    rank = saved(store, run, 1)
    stall = proxy.add(is_read_of_data, stall_s=5.0)
    before = len(proxy.seen)
    assert rank.loads(store, 1)
    assert stall.hits == 1
    asked = [request.headers.get("range") for request in proxy.seen[before:] if is_read_of_data(request)]
    assert len(asked) > len(set(asked)), "it waited for the silent one, and did not ask again"


@pytest.mark.slow
@pytest.mark.parametrize("when", [is_part, is_completion, is_commit], ids=["upload", "completion", "commit"])
def test_a_save_outlives_a_server_that_is_away_for_a_while(
    when: Callable[[Request], bool], proxy: FaultProxy, store: S3Store, run: str
) -> None:
    rank = OneRank(store, run)
    fault = proxy.add(when, then=proxy.down)
    rank.save(1)
    while not fault.hits:
        time.sleep(0.01)
    time.sleep(1.0)
    proxy.up()
    assert rank.saver.wait() == 1, rank.failures()
    assert rank.loads(store, 1)


@pytest.mark.slow
def test_a_load_outlives_a_server_that_is_away_and_says_so_when_it_stays_away(
    proxy: FaultProxy, store: S3Store, seaweed_server: SeaweedServer, run: str
) -> None:
    rank = saved(store, run, 1)
    hasty = opened(proxy, seaweed_server, HASTY)
    proxy.down()
    with pytest.raises(ServerNotThere, match=r"COMMIT: no answer from the S3 server at http://127\.0\.0\.1:\d+"):
        rank.loads(hasty, 1)
    threading.Timer(1.0, proxy.up).start()
    assert rank.loads(store, 1)


@pytest.mark.parametrize(
    "damage", ["truncated", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("flipped", "missing", "commit"))]
)
def test_a_damaged_object_is_named_and_the_newest_whole_checkpoint_is_used(
    damage: str, beside: S3Store, run: str
) -> None:
    rank = saved(beside, run, 1, 2)
    bad = commit_key(run, 2) if damage == "commit" else rank_key(run, 2, rank.attempt, 0)
    data = bytearray(beside.get(bad))
    if damage == "missing":
        beside.delete([bad])
    elif damage == "truncated":
        beside.put(bad, data[:-1000])
    else:
        data[len(data) // 2] ^= 1
        beside.put(bad, data if damage == "flipped" else data[: len(data) // 2])
    assert newest(beside, run) == (1, [bad])
    with pytest.raises(CheckpointError) as caught:
        rank.loads(beside, 2)
    assert caught.value.problems[0].key.endswith(bad)
    assert rank.loads(beside, 1)
