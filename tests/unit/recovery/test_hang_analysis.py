"""Who waits for whom is followed to the rank that everything waits for."""

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypp.control.recovery.hang_analysis import RankActivity, find_culprit
from raypp.records import Coordinates

STAGES = [0, 1, 2, 3]


def ranks(
    *phases: str, still: Iterable[float] = (), inside: dict[int, str] | None = None, **more: object
) -> list[RankActivity]:
    """A pipeline with one rank per stage; `silent` names ranks that do not report."""
    seconds = list(still) or [70.0] * len(phases)
    silent = more.get("silent", ())
    assert isinstance(silent, tuple)
    return [
        RankActivity(
            rank, f"pp{rank}", Coordinates(rank), phase, seconds[rank], f"node-{rank}", 100 + rank, rank in silent,
            (inside or {}).get(rank, ""),
        )
        for rank, phase in enumerate(phases)
    ]  # fmt: skip


def placed(*marks: tuple[Any, ...]) -> list[RankActivity]:
    """Ranks by pipeline rank, replica, place in the shards, phase and collective."""
    return [
        RankActivity(rank, f"pp{pp}-dp{dp}-fsdp{fsdp}", Coordinates(pp, dp, fsdp), phase, 61.0, inside="".join(inside))
        for rank, (pp, dp, fsdp, phase, *inside) in enumerate(marks)
    ]


HELD_UP = {1: "all_gather"}


@pytest.mark.parametrize(
    ("stuck", "rank", "words"),
    [
        pytest.param(
            ranks("step 0B3 waits", "step 1F5", "step 2F7 waits", inside=HELD_UP, still=(40, 41, 39)), 1,
            ["has been in all_gather for 41 s (`step 1F5`)"], id="waiting stages and one in a collective",
        ),
        pytest.param(
            ranks("step 0W3", "step 1F5", "step 2F7 waits", inside=HELD_UP, still=(1, 41, 39)), 1,
            ["pp2 (rank 2, node node-2, pid 102) waits for forward 7 from stage 1 on pp1"], id="it has one neighbour",
        ),
        pytest.param(
            ranks("step 0B0 waits", "step 1B0 waits", "step 2B0 waits", "step 3F4", still=(75, 74, 73, 80)), 3,
            ["pp0 (rank 0, node node-0, pid 100) waits for backward 0 from stage 1 on pp1",
             "which has been computing forward 4 of stage 3 for 80 s (`step 3F4`)"], id="a long chain",
        ),
        pytest.param(
            ranks("step 0B0 waits", "step 1F7", "step agree", still=(70, 66, 70), silent=(1,)), 1,
            ["has not reported for 66 s"], id="frozen, and reported last that it moved",
        ),
        pytest.param(
            ranks("step agree", "step agree", still=(70, 66), silent=(1,)), 1,
            ["pp0 (rank 0, node node-0, pid 100) waits for the agreement on the step with pp1"], id="frozen in one",
        ),
        pytest.param(
            ranks("step sum", "step sum", still=(70, 66), silent=(1,)), 1,
            ["pp0 (rank 0, node node-0, pid 100) waits for the sum of loss and norms with pp1"], id="frozen in a sum",
        ),
        pytest.param(
            ranks("step agree", "step 8 read", "step agree", still=(60, 61, 60)), 1,
            ["waits for the agreement on the step with pp1", "has been waiting for its data for 61 s"], id="reads data",
        ),
        *(
            pytest.param(ranks("step agree", phase, still=(60, 61)), 1, ["waiting for the store for 61 s"], id=phase)
            for phase in ("save step 10 waits for the save of step 5", "load")
        ),
        pytest.param(
            ranks("step sends", "step 1B7", "step sum", still=(70, 71, 60)), 1,
            ["has been computing backward 7 of stage 1"], id="nobody takes the last messages of a rank",
        ),
        pytest.param(
            placed((0, 0, 0, "step 0F1", "all_gather"), (0, 0, 1, "step 0F0"), (0, 0, 2, "step 0F1", "all_gather")), 1,
            ["for all_gather with pp0-dp0-fsdp1 (rank 1), which has been computing forward 0 of stage 0 for 61 s"],
            id="not in the collective of its stage",
        ),
        pytest.param(
            placed((0, 0, 0, "step sums"), (0, 1, 0, "step 0B7"), (1, 0, 0, "step sum"), (1, 1, 0, "step sum")), 1,
            ["waits for the sum of gradients with pp0-dp1-fsdp0 (rank 1)"], id="not in the sum of replicas",
        ),
        pytest.param(
            placed(
                (0, 0, 0, "step agree"), (0, 0, 1, "step 0F5"), (1, 0, 0, "step agree"), (1, 0, 1, "step 1F5 waits"),
            ), 1, [], id="pipelines beside each other",
        ),
    ],
)  # fmt: skip
def test_the_rank_that_everything_waits_for_is_blamed(stuck: list[RankActivity], rank: int, words: list[str]) -> None:
    blame = find_culprit(stuck, STAGES)
    assert blame.rank == rank and not blame.ring
    assert [word for word in words if word not in blame.cause] == []


def tensor_ranks(*marks: tuple[Any, ...]) -> list[RankActivity]:
    """Two stages of tp 2: the marks of one stage follow each other."""
    return [
        RankActivity(
            at, f"pp{at // 2}-tp{at % 2}", Coordinates(at // 2, tp=at % 2), phase, 61.0, inside="".join(inside)
        )
        for at, (phase, *inside) in enumerate(marks)
    ]


@pytest.mark.parametrize(
    ("marks", "words"),
    [
        ([("step 0W7",), ("step 0W7",), ("step tensor sum",), ("step 1B7",)], "the sum of gradients over tp with"),
        (
            [("step tensor sum",), ("step 0B7 waits",), ("step tensor sum",), ("step 1B7",)],
            "backward 7 from stage 1 on",
        ),
        ([*[("step 0B3 waits",)] * 2, ("step 1F4", "reduce_scatter"), ("step 1F4",)], "reduce_scatter with"),
    ],
)
def test_a_rank_waits_for_those_that_compute_its_layers_with_it(marks: list[tuple[str, ...]], words: str) -> None:
    blame = find_culprit(tensor_ranks(*marks), STAGES)
    assert blame.rank == 3 and not blame.ring
    assert f"waits for {words} pp1-tp1" in blame.cause


def test_stages_on_one_rank_are_found_by_their_placement() -> None:
    blame = find_culprit(ranks("step 3F2 waits", "step 2F2", still=(70, 71)), [0, 1, 1, 0])
    assert blame.rank == 1 and "waits for forward 2 from stage 2 on pp1" in blame.cause


def test_ranks_that_wait_for_each_other_are_reported_as_a_ring_and_none_is_blamed() -> None:
    blame = find_culprit(ranks("step 0B3 waits", "step 1F4 waits", still=(70, 90)), STAGES)
    assert blame.ring and blame.rank is None
    assert "ranks have waited for each other for 90 s" in blame.cause
    assert "forward 4 from stage 0 on pp0" in blame.cause and "backward 3 from stage 1 on pp1" in blame.cause


def test_a_collective_that_everybody_is_in_has_nobody_to_blame() -> None:
    """Marks of hosts on GPUs: each has queued its step, and waits for what the devices compute."""
    blame = find_culprit(ranks("step sum", "step sum", "step sum", still=(61.0, 60.7, 60.2)), STAGES)
    assert blame.rank is None and not blame.ring
    assert blame.cause.startswith("all its ranks have been in the sum of loss and norms for 6")


MARKS = ["agree", "sum", "sums", "tensor sum", "sends", "4 read"]
PHASES = st.one_of(
    st.sampled_from(["load", *(f"step {mark}" for mark in MARKS), "save x", "", "finish"]),
    st.builds(
        lambda stage, kind, microbatch, waits: f"step {stage}{kind}{microbatch}{waits}",
        st.integers(0, 3), st.sampled_from("FBIW"), st.integers(0, 9), st.sampled_from(["", " waits"]),
    ),
)  # fmt: skip


@settings(deadline=None)  # a loaded machine is no failure
@given(
    st.lists(
        st.tuples(PHASES, st.floats(0, 1e4), st.booleans(), st.sampled_from(["", "all_gather"]), st.integers(0, 3)),
        min_size=1,
        max_size=4,
    )
)
def test_whatever_the_ranks_do_the_cause_is_reported_in_words_of_bounded_length(
    marks: list[tuple[str, float, bool, str, int]],
) -> None:
    activities = [
        RankActivity(rank, f"pp{rank}", Coordinates(rank), phase, still, silent=silent, inside=inside, reached=reached)
        for rank, (phase, still, silent, inside, reached) in enumerate(marks)
    ]
    blame = find_culprit(activities, STAGES)
    assert blame.rank in (None, *range(len(activities))) and 0 < len(blame.cause) < 1200
    silent = [activity.rank for activity in activities if activity.silent]
    if silent:
        assert blame.rank in silent


def replicas_apart(*phases: str) -> list[RankActivity]:
    """Two replicas of two stages: ranks 0 and 1 are the first."""
    return [
        RankActivity(rank, f"rank {rank}", Coordinates(rank % 2, rank // 2), phase, 70.0, f"node-{rank}", 100 + rank)
        for rank, phase in enumerate(phases)
    ]


def test_a_replica_that_trains_apart_waits_in_itself_and_the_others_for_it() -> None:
    blame = find_culprit(replicas_apart("step outer", "step outer", "step replica sum", "step 1F3"), [0, 1])
    assert blame.rank == 3 and not blame.ring
    blame = find_culprit(replicas_apart("step outer", "step outer", *["step replica agree"] * 2), [0, 1])
    assert blame.rank is None and not blame.ring
    assert "all its ranks have been in the agreement on the step for 70 s" in blame.cause
