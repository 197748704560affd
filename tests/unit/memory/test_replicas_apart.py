"""Snapshots of replicas that train apart: which belong together, and which a tier keeps."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypp.job.job import Job
from raypp.job.load import parse_job
from raypp.records import Coordinates, Reporter, Seat
from raypp.state.memory.files import DIRECTORY_VARIABLE
from raypp.state.memory.rank_slots import RunLife
from raypp.state.memory.restore import Snapshots, choose
from raypp.state.memory.tier import Apart, MemoryTier

TWO = ([1, 2, 2, 1, 1], "1")
"""Two replicas of two ranks: 0 and 1, 2 and 3."""


def job_of(replicas: int = 2, fragments: int = 1) -> Job:
    sync = {"kind": "outer", "every_steps": 8, "fragments": fragments}
    mesh, data = {"dp_replicate": replicas, "fsdp": 2}, {"kind": "synthetic"}
    return parse_job({"name": "a", "mesh": mesh, "data": data, "train": {"steps": 30, "sync": sync}})


def seen(*steps: tuple[int, ...], attempt: int = 1, mesh: Any = TWO) -> list[list[Any]]:
    """The snapshots of each rank, of these steps."""
    return [[attempt, step, rank, -1, *mesh] for rank, of_rank in enumerate(steps) for step in of_rank]


def chosen(snapshots: list[list[Any]], commit: int = -1, **job: int) -> Snapshots:
    best, why = choose([snapshots], commit, (), job_of(**job))
    assert best is not None, why
    return best


def test_each_replica_goes_on_from_its_newest_step_since_the_same_outer_step() -> None:
    best = chosen(seen((10, 11), (10, 11, 12), (13, 14), (13, 14)), 8)
    assert best.replicas == {0: 11, 1: 14} and best.step == 14 and not best.missing
    assert [best.step_of(rank) for rank in range(4)] == [11, 11, 14, 14]
    assert best.origins(2) == [0, 1] and best.origins(1) == [1] and best.origins(3) == [0, 1, 0]


def test_snapshots_of_two_periods_do_not_belong_together() -> None:
    across = seen((6, 7), (6, 7), (7, 8), (7, 8))
    assert chosen(across).replicas == {0: 7, 1: 7}
    assert chosen(across, replicas=1).replicas == {1: 8}, "one that goes on alone needs no other"
    fragments = seen((3, 4), (3, 4), (3, 5), (3, 5))
    assert chosen(fragments).replicas == {0: 4, 1: 5}
    assert chosen(seen((3,), (3,), (3, 5), (3, 5)), fragments=2).replicas == {0: 3, 1: 3}


def test_what_is_left_of_a_replica_is_not_used() -> None:
    best = chosen(seen((), (12,), (11, 12), (11, 12)), 8)
    assert best.replicas == {1: 12} and best.missing == [0, 1] and best.origins(2) == [1, 1]
    assert choose([seen((), (12,), (12,), ())], 8, (), job_of())[1] == (
        "the snapshots of ranks [0, 3] of step 12 are in no memory"
    )
    best, why = choose([seen((7,), (7,), (7,), (7,))], 8, (), job_of())
    assert (best, why) == (None, "no snapshot in memory is newer")


APART = Coordinates(1, 2, 2, 1, 1)


@pytest.fixture
def tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryTier]:
    """The tier of rank 0 of two replicas with an outer step every 8 steps, begun at step 2."""
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    outer = cast(Any, SimpleNamespace(replicas=2, differs=True))
    seat, life = Seat("a", 1, 0, 4, Coordinates(), APART), RunLife("a", "0" * 12, "0" * 16)
    tier = MemoryTier(life, seat, 1, cast(Reporter, None), apart=Apart(job_of(), outer, None))
    tier._begun_at = tier._taken = 2
    yield tier
    tier.close(delete=True)


@pytest.mark.parametrize(
    ("kept", "newest", "others", "expected"),
    [
        (-1, [5], -1, 5),  # nothing is there that another replica could need
        (5, [6], -1, 6),  # of one period
        (7, [8], -1, 7),
        (7, [8], 6, 7),
        (7, [9, 8], 8, 9),
        (7, [16, 9], 8, 9),  # what all have a snapshot of, not what came after
        (7, [16, 9], 16, 16),
        (7, [9, 7], 16, 7),  # the others do not have this period
        (2, [3, 2], -1, 2),  # the restored one, until all have one of this attempt
        (2, [3, 2], 4, 3),
    ],
)
def test_a_snapshot_stays_until_all_replicas_have_one_of_the_same_later_period(
    tier: MemoryTier, kept: int, newest: list[int], others: int, expected: int
) -> None:
    assert tier._kept_step(kept, newest, others) == expected


def test_a_tier_hears_of_the_last_period_that_all_had(tier: MemoryTier) -> None:
    for kept, known in [
        ([(4, -1), (-1, -1)], (-1, -1)),
        ([(4, 3), (6, -1)], (4, -1)),
        ([(8, 3), (7, 5)], (4, 3)),
        ([(9, 8), (8, 5)], (8, 3)),
    ]:
        tier.hear(kept)
        assert tier._heard == known


def test_no_replica_begins_a_third_period_until_all_agree(tier: MemoryTier) -> None:
    def due(common: int, newest: int, every: int = 1) -> list[int]:
        tier._common, tier._newest, tier._taken = common, (newest, -1), newest
        return [n for n in range(newest + 1, 28) if tier._is_due(n, every, together=n % 8 == 0)]

    assert due(7, 7) == list(range(8, 28))
    assert due(7, 9) == [*range(10, 16), 16, 24], "8 to 15 is not known of all yet"
    assert due(9, 9, every=3) == [12, 13, 14, 15, *range(16, 28)]
    assert due(16, 16, every=10) == [], "the next is at step 32, where all take one"
    assert tier._is_due(32, 10, together=True)


def test_copies_begin_where_all_agree_and_go_to_another_site_after_outer_steps_only(tier: MemoryTier) -> None:
    def copied(last: int) -> list[int]:
        tier._copied = last
        return [step for step in range(8, 31) if tier._is_copied(step, together=step % 8 == 0)]

    assert copied(-1) == [8, 16, 24] and copied(8) == [*range(8, 16), 16, 24]
    tier._near = False
    assert copied(8) == [8, 16, 24]


class Played(MemoryTier):
    """A replica's tier whose snapshots are steps in a list, complete when the test says so."""

    def begin(self, job: Job) -> None:
        self.files: list[int | None] = [None] * self._files
        self._begun_at = self._taken = 0
        self._started = self._asked = self._ready = self._announced = True
        self._slots = cast(Any, SimpleNamespace(remove_earlier_files=lambda: None, close=lambda **_: None))

    def _state(self, gather: Any) -> Any:
        return []

    def _take(self, done: int, slices: Any, extra: str, copy: bool) -> None:
        kept = self._needed | {self._taken}
        self.files[next(n for n, step in enumerate(self.files) if step not in kept)] = None
        self._taken = self._expected = done

    def complete(self) -> None:
        if self._own_step != self._expected:
            self.files[self.files.index(None)] = self._own_step = self._expected


def run_apart(tiers: list[Played], job: Job, draw: Callable[[int], int]) -> None:
    """Plays the steps of replicas that run freely between the agreements of all. `draw` chooses,
    below a number, who is next, whether a snapshot is complete, and what a replica has heard of."""
    done, heard = [0] * len(tiers), [0] * len(tiers)
    added: list[list[tuple[int, int]]] = [[] for _ in tiers]

    def hear(index: int, most: int) -> None:
        while heard[index] < min(most, *map(len, added)):
            tiers[index].hear([of[heard[index]] for of in added])
            heard[index] += 1

    while min(done) < job.train.steps:
        index = draw(len(tiers))
        step, who = done[index], [index]
        if job.all_meet(step):
            if set(done) != {step}:
                continue
            who = list(range(len(tiers)))
        for one in who:
            hear(one, step if job.all_meet(step) else draw(2) * step)
            if not draw(3):
                tiers[one].complete()
        states = [tiers[one].signals() for one in who]
        others, unready = max(state.others for state in states), any(state.unready for state in states)
        for one, state in zip(who, states, strict=True):
            agreed = replace(state, unready=unready, others=others)
            tiers[one].step_begins(step, agreed, cast(Any, None), lambda: "")
            if not draw(3):
                tiers[one].complete()
            done[one] += 1
            added[one].append(tiers[one].kept(done[one]))
        whole = [{job.period(kept) for kept in tier.files if kept is not None} for tier in tiers]
        if any(tier._superseded for tier in tiers):
            assert set.intersection(*whole), [tier.files for tier in tiers]


@given(data=st.data(), every=st.sampled_from([1, 2, 4, 8]), fragments=st.sampled_from([1, 2, 4]), gap=st.integers(1, 5))
@settings(max_examples=150, deadline=None)
def test_replicas_have_snapshots_of_one_period_at_every_moment(
    data: st.DataObject, every: int, fragments: int, gap: int
) -> None:
    """Whatever is late: a snapshot, a replica, or what it hears of the others."""
    if every % fragments:
        return
    sync = {"kind": "outer", "every_steps": every, "fragments": fragments}
    document = {"name": "a", "mesh": {"dp_replicate": 2}, "data": {"kind": "synthetic"}}
    job = parse_job({**document, "model": {"num_layers": 4}, "train": {"steps": 48, "sync": sync}})
    outer = cast(Any, SimpleNamespace(replicas=2, differs=True))
    random = data.draw(st.randoms(use_true_random=False))
    tiers = [
        Played(RunLife("a", "0" * 12, "0" * 16), Seat("a", 1, rank, 2, Coordinates(), Coordinates(1, 2, 1, 1, 1)), gap,
               cast(Reporter, None), apart=Apart(job, outer, None))
        for rank in range(2)
    ]  # fmt: skip
    for tier in tiers:
        tier.begin(job)
    run_apart(tiers, job, random.randrange)
    assert all(tier._superseded for tier in tiers)
