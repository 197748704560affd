"""The choice of the warm-up depth from the ranks' measurements."""

from typing import Any

import pytest

from raypp.job.load import parse_job
from raypp.planning.decision import ResolvedPipeline
from raypp.planning.resolve import resolve_pipeline
from raypp.rank.step.tune_lookahead import choose


def pipeline_of(
    pp: int = 2, schedule: str = "1f1b", stages_per_rank: int = 1, microbatches: int = 16
) -> ResolvedPipeline:
    pipeline: dict[str, Any] = {
        "schedule": schedule, "stages_per_rank": stages_per_rank, "microbatches": microbatches,
    }  # fmt: skip
    job = parse_job({"name": "a", "model": {"num_layers": 16}, "mesh": {"pp": pp}, "pipeline": pipeline})
    return resolve_pipeline(job)


def figures(
    stages: int, link: float, room: int = 99, forward: float = 0.2, crowded: float | None = None, spread: float = 0.0
) -> list[float]:
    """Measurements of stages that are alike, each on a node of its own."""
    alike = forward, 2 * forward, 0.0, link, link if crowded is None else crowded, spread
    nodes = [float(stage) for stage in range(stages)]
    return [*(number for one in alike for number in [one] * stages), *nodes, *([-float(room)] * stages)]


@pytest.mark.parametrize(("link", "depth"), [(0.0, 0), (0.1, 1), (0.2, 1), (0.3, 1), (0.5, 2)])
def test_a_slower_link_gets_a_deeper_warmup(link: float, depth: int) -> None:
    assert choose(pipeline_of(pp=4, microbatches=32), figures(4, link)).best.lookahead == depth


def test_the_choice_says_what_was_measured() -> None:
    words = choose(pipeline_of(), figures(2, 0.31)).words()
    measured = "link 0.31 s per message against 0.20 s forward and 0.40 s backward between stage 0 and 1"
    assert words.startswith(f"lookahead 1: {measured}; a step of")
    event = choose(pipeline_of(), figures(2, 0.31)).event(4, 1)
    assert event.details["lookahead"] == 1 and event.details["link_s"] == [0.31] and event.step == 4


def test_memory_limits_the_depth_and_it_is_said() -> None:
    choice = choose(pipeline_of(pp=4, microbatches=32), figures(4, 0.2, room=6))
    assert choice.best.lookahead == 0
    assert choice.words().endswith("a deeper warm-up does not pay off; 1 needs more memory")
    assert choose(pipeline_of(pp=4, microbatches=32), figures(4, 0.2, room=7)).best.lookahead == 1


def test_the_plan_limits_the_depth_as_it_does_before_the_run() -> None:
    pipeline = pipeline_of(pp=4, microbatches=32)
    assert choose(pipeline, figures(4, 0.5)).best.lookahead == 2
    choice = choose(pipeline, figures(4, 0.5), lambda depth, one: depth != 2)
    assert choice.best.lookahead == 1 and choice.words().endswith("2 needs more memory")


@pytest.mark.parametrize(("schedule", "stages_per_rank"), [("gpipe", 1), ("looped_bfs", 2)])
def test_schedules_without_a_deeper_warmup_say_so(schedule: str, stages_per_rank: int) -> None:
    choice = choose(pipeline_of(schedule=schedule, stages_per_rank=stages_per_rank), figures(2 * stages_per_rank, 0.3))
    assert choice.best.lookahead == 0 and choice.words().endswith("this schedule has no deeper warm-up")


def test_split_backwards_are_simulated_with_their_two_parts() -> None:
    numbers = figures(4, 0.0)
    numbers[8:12] = [0.0, *[0.1] * 3]  # the first stage's input needs no gradient
    times = choose(pipeline_of(schedule="zbv", stages_per_rank=2), numbers).times
    assert times.input_share == pytest.approx(0.25) and times.first_whole


def test_a_card_that_carries_several_messages_needs_a_deeper_warmup_than_its_wire() -> None:
    pipeline = pipeline_of(pp=4, microbatches=16)
    apart, shared = (choose(pipeline, figures(4, 0.3, crowded=crowded)) for crowded in (0.3, 0.6))
    assert apart.times.cards is None and shared.times.cards == [None, 1, 2, None]
    assert apart.times.link == shared.times.link == [0.3] * 3, "the wire is the same"
    assert (apart.best.lookahead, shared.best.lookahead) == (1, 2)
    assert shared.best.step_s > apart.best.step_s
    assert "link 0.30 s per message, 0.60 s while its cards carry others, against 0.20 s" in shared.words()
    assert "carry others" not in apart.words()
    details = shared.details()
    assert details["wire_s"] == [0.3] * 3 and details["crowded_s"] == [0.6] * 3
    assert details["cards"] == [None, 1, 2, None]


def test_a_queue_of_messages_does_not_make_the_warmup_deeper_than_needed() -> None:
    """As measured on four hosts: 42 ms for a message alone, 97 ms among others."""
    numbers = figures(4, 0.042, forward=0.042, crowded=0.097)
    choice = choose(pipeline_of(pp=4, microbatches=16), numbers)
    assert choice.best.lookahead == 1
    assert choice.best.step_s == pytest.approx(16 * 3 * 0.042 + 9 * 0.042 + 6 * 0.0485, rel=0.01)
    taken_for_the_wire = choose(pipeline_of(pp=4, microbatches=16), figures(4, 0.097, forward=0.042))
    assert taken_for_the_wire.best.lookahead > 1


def test_times_that_vary_are_simulated_several_times() -> None:
    pipeline = pipeline_of(pp=4, microbatches=16)
    exact, varied = (choose(pipeline, figures(4, 0.2, spread=spread)) for spread in (0.0, 0.2))
    assert varied.times.spread == 0.2 and varied.details()["spread"] == 0.2
    assert exact.candidates[1].step_s == varied.candidates[1].timeline.makespan != varied.candidates[1].step_s
    assert choose(pipeline, figures(4, 0.2, crowded=0.4)).times.link_spread > 0
    assert choose(pipeline, figures(4, 0.2, spread=9.0)).times.spread < 0.5
