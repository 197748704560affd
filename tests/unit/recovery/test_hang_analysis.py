"""Who waits for whom is followed to the rank that everything waits for."""

from __future__ import annotations

from collections.abc import Iterable

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


def test_a_chain_of_waiting_stages_ends_with_the_one_that_is_in_a_collective() -> None:
    stuck = ranks("step 0B3 waits", "step 1F5", "step 2F7 waits", inside={1: "all_gather"}, still=(40, 41, 39))
    blame = find_culprit(stuck, STAGES)
    assert blame.rank == 1 and not blame.ring
    assert (
        "pp2 (rank 2, node node-2, pid 102) waits for forward 7 from stage 1 on pp1"
        in find_culprit(
            ranks("step 0W3", "step 1F5", "step 2F7 waits", inside={1: "all_gather"}, still=(1, 41, 39)), STAGES
        ).cause
    )
    assert "has been in all_gather for 41 s (`step 1F5`)" in blame.cause


def test_a_long_chain_is_followed_to_its_end() -> None:
    stuck = ranks("step 0B0 waits", "step 1B0 waits", "step 2B0 waits", "step 3F4", still=(75, 74, 73, 80))
    blame = find_culprit(stuck, STAGES)
    assert blame.rank == 3
    assert blame.cause.startswith("pp0 (rank 0, node node-0, pid 100) waits for backward 0 from stage 1 on pp1")
    assert blame.cause.endswith("which has been computing forward 4 of stage 3 for 80 s (`step 3F4`)")


def test_a_frozen_rank_is_blamed_although_it_reported_last_that_it_moved() -> None:
    blame = find_culprit(ranks("step 0B0 waits", "step 1F7", "step agree", still=(70, 66, 70), silent=(1,)), STAGES)
    assert blame.rank == 1 and "has not reported for 66 s" in blame.cause


def test_a_rank_that_froze_in_a_collective_is_not_in_it() -> None:
    for phase, name in (("step agree", "the agreement on the step"), ("step sum", "the sum of loss and norms")):
        blame = find_culprit(ranks(phase, phase, still=(70, 66), silent=(1,)), STAGES)
        assert blame.rank == 1
        assert blame.cause.startswith(f"pp0 (rank 0, node node-0, pid 100) waits for {name} with pp1")


def test_ranks_that_wait_for_each_other_are_reported_as_a_ring_and_none_is_blamed() -> None:
    blame = find_culprit(ranks("step 0B3 waits", "step 1F4 waits", still=(70, 90)), STAGES)
    assert blame.ring and blame.rank is None
    assert "ranks have waited for each other for 90 s" in blame.cause
    assert "forward 4 from stage 0 on pp0" in blame.cause and "backward 3 from stage 1 on pp1" in blame.cause


def test_a_rank_that_reads_its_data_holds_up_the_agreement() -> None:
    blame = find_culprit(ranks("step agree", "step 8 read", "step agree", still=(60, 61, 60)), STAGES)
    assert blame.rank == 1
    assert "waits for the agreement on the step with pp1" in blame.cause
    assert "has been waiting for its data for 61 s" in blame.cause


def test_a_rank_that_waits_for_the_store_is_reported_as_that() -> None:
    for phase in ("save step 10 waits for the save of step 5", "load"):
        blame = find_culprit(ranks("step agree", phase, still=(60, 61)), STAGES)
        assert blame.rank == 1 and "has been waiting for the store for 61 s" in blame.cause


def test_of_a_collective_in_a_stage_the_one_that_is_not_in_it_is_blamed() -> None:
    def of(fsdp: int, phase: str, inside: str = "") -> RankActivity:
        return RankActivity(fsdp, f"pp0-fsdp{fsdp}", Coordinates(0, 0, fsdp), phase, 61.0 - fsdp, inside=inside)

    everyone = [of(0, "step 0F1", "all_gather"), of(1, "step 0F0"), of(2, "step 0F1", "all_gather")]
    blame = find_culprit(everyone, [0])
    assert blame.rank == 1
    assert (
        "waits for all_gather with pp0-fsdp1 (rank 1), which has been computing forward 0 of stage 0 for 60 s"
        in blame.cause
    )


def test_a_collective_that_everybody_is_in_has_nobody_to_blame() -> None:
    """Marks of hosts on GPUs: each has queued its step, and waits for what the devices compute."""
    blame = find_culprit(ranks("step sum", "step sum", "step sum", still=(61.0, 60.7, 60.2)), STAGES)
    assert blame.rank is None and not blame.ring
    assert blame.cause.startswith("all its ranks have been in the sum of loss and norms for 6")


def test_a_rank_whose_last_messages_nobody_takes_waits_for_the_neighbour_that_still_works() -> None:
    blame = find_culprit(ranks("step sends", "step 1B7", "step sum", still=(70, 71, 60)), STAGES)
    assert blame.rank == 1 and "has been computing backward 7 of stage 1" in blame.cause


def test_in_the_sums_of_gradients_the_replica_that_is_not_there_is_blamed() -> None:
    def of(rank: int, pp: int, replica: int, phase: str) -> RankActivity:
        return RankActivity(rank, f"pp{pp}-dp{replica}", Coordinates(pp, replica), phase, 61.0)

    everyone = [of(0, 0, 0, "step sums"), of(1, 0, 1, "step 0B7"), of(2, 1, 0, "step sum"), of(3, 1, 1, "step sum")]
    blame = find_culprit(everyone, [0, 1])
    assert blame.rank == 1
    assert "waits for the sum of gradients with pp0-dp1 (rank 1)" in blame.cause


def test_stages_on_one_rank_are_found_by_their_placement() -> None:
    v_shape = [0, 1, 1, 0]
    blame = find_culprit(ranks("step 3F2 waits", "step 2F2", still=(70, 71)), v_shape)
    assert blame.rank == 1 and "waits for forward 2 from stage 2 on pp1" in blame.cause


def test_pipelines_beside_each_other_are_not_mixed_up() -> None:
    def of(rank: int, pp: int, fsdp: int, phase: str) -> RankActivity:
        return RankActivity(rank, f"pp{pp}-fsdp{fsdp}", Coordinates(pp, 0, fsdp), phase, 61.0)

    everyone = [
        of(0, 0, 0, "step agree"),
        of(1, 0, 1, "step 0F5"),
        of(2, 1, 0, "step agree"),
        of(3, 1, 1, "step 1F5 waits"),
    ]
    blame = find_culprit(everyone, [0, 1])
    assert blame.rank == 1


PHASES = st.one_of(
    st.sampled_from(
        ["load", "step agree", "step sum", "step sums", "step sends", "step 4 read", "save x", "", "finish"]
    ),
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
