"""What is due when, as a table."""

from dataclasses import replace
from typing import Any

import pytest

from raypp.job.load import parse_job
from raypp.rank.step.loop import Due, Place, after_step, before_step, is_due
from raypp.records import Requests, SaveProgress

SAVE, STOP, DROP = Requests(save=True), Requests(stop=True), Requests(stop=True, save_before_stop=False)


@pytest.mark.parametrize(
    ("place", "requests", "then", "due"),
    [
        # done, restored, saved, whether a save was asked for
        ((3, 0, 2), Requests(), (3, 0, 2), Due()),
        ((3, 0, 2), SAVE, (3, 0, 3), Due(save=True)),
        ((3, 0, 3), SAVE, (3, 0, 3), Due()),  # it is saved already
        ((3, 3, 3), SAVE, (3, 3, 3, True), Due()),  # nothing to save before the first step: it waits
        ((4, 3, 3, True), Requests(), (4, 3, 4), Due(save=True)),
        ((0, 0, 0), SAVE, (0, 0, 0, True), Due()),
        ((5, 5, 2), Requests(), (5, 5, 2), Due()),  # restored from memory
        ((5, 5, 2), SAVE, (5, 5, 5), Due(save=True)),
        ((3, 0, 2), STOP, (3, 0, 3), Due(save=True, stop=True)),
        ((3, 0, 3), STOP, (3, 0, 3), Due(stop=True)),
        ((3, 3, 3), STOP, (3, 3, 3), Due(stop=True)),
        ((3, 0, 2), DROP, (3, 0, 2), Due(stop=True, save_is_needed=False)),
        ((3, 0, 2, True), DROP, (3, 0, 3), Due(save=True, stop=True, save_is_needed=False)),
    ],
)
def test_before_a_step(place: tuple[Any, ...], requests: Requests, then: tuple[Any, ...], due: Due) -> None:
    assert before_step(Place(*place), requests) == (Place(*then), due)


@pytest.mark.parametrize(
    ("requests", "waiting", "later"),
    [
        (Requests(), {}, Due()),
        (SAVE, {"asked": True}, Due(save=True)),
        (STOP, {"stopping": True}, Due(save=True, stop=True)),
    ],
)
def test_requests_wait_for_the_next_outer_step(requests: Requests, waiting: dict[str, bool], later: Due) -> None:
    place, due = before_step(Place(3, 0, 2), requests, savable=False)
    assert (place, due) == (Place(3, 0, 2, **waiting), Due())
    assert place.requests(Requests()) == requests
    assert before_step(replace(place, done=4), Requests())[1] == later


def test_a_stop_without_a_save_waits_for_the_next_agreement_of_all_ranks() -> None:
    assert before_step(Place(3, 0, 2), DROP, savable=False, everyone=False)[1] == Due()
    assert before_step(Place(3, 0, 2), DROP, savable=False)[1] == Due(stop=True, save_is_needed=False)


@pytest.mark.parametrize(("requests", "due"), [(SAVE, Due(save=True)), (Requests(trace=3), Due(trace=3))])
def test_what_one_replica_was_asked_waits_until_all_know(requests: Requests, due: Due) -> None:
    place, now = before_step(Place(3, 0, 2), requests, savable=False, everyone=False)
    assert now == Due() and place.requests(Requests()) == requests
    after, then = before_step(replace(place, done=4), place.requests(Requests()))
    assert then == due and after.requests(Requests()) == Requests()


@pytest.mark.parametrize(
    ("done", "saving", "checkpoint", "saved", "due"),
    [
        (3, False, {}, 4, Due(save=True)),
        (4, False, {}, 0, Due()),
        (4, True, {"if_busy": "skip"}, 0, Due()),
        (3, True, {}, 4, Due(save=True)),
        (3, True, {"if_busy": "skip"}, 0, Due(skip=True)),
        (3, False, {"if_busy": "skip"}, 4, Due(save=True)),
        (9, False, {}, 10, Due(save=True, last=True)),
        (9, True, {"if_busy": "skip"}, 10, Due(save=True, last=True)),
        (9, False, {"every_steps": 0}, 10, Due(save=True, last=True)),
        (3, False, {"every_steps": 0}, 0, Due()),
        (3, SaveProgress.STUCK, {}, 0, Due()),
        (3, SaveProgress.STUCK, {"if_busy": "skip"}, 0, Due()),
        (9, SaveProgress.STUCK, {}, 10, Due(save=True, last=True)),
    ],
)
def test_after_a_step(done: int, saving: int, checkpoint: dict[str, Any], saved: int, due: Due) -> None:
    job = parse_job({"name": "a-run", "train": {"steps": 10}, "checkpoint": {"every_steps": 4, **checkpoint}})
    place = Place(done, 0, 0, asked=True)
    assert after_step(place, job, SaveProgress(saving)) == (Place(done + 1, 0, saved, asked=True), due)


def test_evaluation_and_samples_are_due_every_so_many_steps_and_at_the_end() -> None:
    assert [step for step in range(1, 8) if is_due(step, 3, 7)] == [3, 6, 7]
