"""The agreement before a step: the vector each rank packs, and the plan from its maximum."""

from dataclasses import replace

import pytest
import torch

from raypp.errors import DataError
from raypp.records import Requests
from raypp.stages.pipeline.agreement import SnapshotState, StepPlan, StepProposal, pack, unpack

UNSAID = -(2**62)


def agreed(proposals: list[tuple[int, StepProposal]], replicas: int) -> list[StepPlan]:
    vectors = torch.stack([pack(proposal, replica, replicas) for replica, proposal in proposals])
    return [unpack(vectors.amax(0), proposal, replica, replicas) for replica, proposal in proposals]


def proposal(lengths: list[int], tokens: int, digest: int, **other: object) -> StepProposal:
    return StepProposal(lengths, tokens, digest, **{"requests": Requests(), **other})  # type: ignore[arg-type]


def test_every_number_has_its_place_on_the_wire() -> None:
    snapshots = SnapshotState(4, own=7, arrived=-1, trouble=1, unready=True, sending=True, others=6, others_arrived=5)
    asked = Requests(save=True, stop=True, save_before_stop=True, trace=3)
    one = StepProposal([16, 24], 30, 99, asked, saving=True, snapshots=snapshots, compute_us=(0, 5000))
    one = replace(one, alloc_retries=2)
    slots = [*[UNSAID] * 7, 16, 24, 30, 99, -99, -7, 1]
    assert pack(one, 1, 2).tolist() == [*slots, 1, 1, 1, 1, 3, 2, 4, 1, 1, 1, 6, 5, 0, 5000]
    assert pack(proposal([16, 24], 30, 99), 0, 1).tolist() == [16, 24, 30, 99, -99, 0, 0, 0, 0, 0, 0]
    assert pack(one, 1, 2).dtype == torch.int64


def test_replicas_keep_their_own_lengths_and_count_all_tokens() -> None:
    first, second = agreed([(0, proposal([16, 24], 30, 1)), (1, proposal([8, 40], 11, 2))], 2)
    assert (first.seq_lens, second.seq_lens) == ((16, 24), (8, 40))
    assert first.global_tokens == second.global_tokens == 41
    assert first.snapshots is None and first.compute_us == ()


def test_what_one_rank_was_asked_for_all_do() -> None:
    quiet = proposal([8], 1, 1)
    for asked in (
        Requests(save=True),
        Requests(stop=True),
        Requests(stop=True, save_before_stop=False),
        Requests(save=True, stop=True),
        Requests(trace=5),
    ):
        plans = agreed([(0, proposal([8], 1, 1, requests=asked)), (0, quiet)], 1)
        assert [plan.requests for plan in plans] == [asked] * 2
    assert agreed([(0, quiet), (0, quiet)], 1)[0].requests == Requests()
    both = [Requests(stop=True, save_before_stop=False), Requests(stop=True)]
    assert agreed([(0, proposal([8], 1, 1, requests=one)) for one in both], 1)[0].requests == both[1]


def test_a_save_that_one_rank_has_not_finished_is_known_to_all() -> None:
    plans = agreed([(0, proposal([8], 1, 1, saving=True)), (0, proposal([8], 1, 1))], 1)
    assert [plan.saving for plan in plans] == [True, True]
    assert not agreed([(0, proposal([8], 1, 1))], 1)[0].saving


def test_snapshots_are_as_old_as_the_oldest_and_as_troubled_as_the_worst() -> None:
    states = [
        SnapshotState(3, 12, 10, 0, False),
        SnapshotState(5, 11, -1, 2, False),
        SnapshotState(4, 13, 9, 1, True, True),
    ]
    plans = agreed([(0, proposal([8], 1, 1, snapshots=state)) for state in states], 1)
    assert [plan.snapshots for plan in plans] == [SnapshotState(5, 11, -1, 2, True, True)] * 3
    assert not any(plan.compute_us for plan in plans)


def test_replicas_that_train_apart_know_the_snapshots_of_their_own_ranks_and_what_any_has_heard() -> None:
    states = [SnapshotState(1, own, own - 1, 0, False, others=own - 5) for own in (12, 11, 19, 18)]
    said = [(n // 2, proposal([8], 1, n // 2, snapshots=state)) for n, state in enumerate(states)]
    vectors = torch.stack([pack(one, replica, 2) for replica, one in said])
    everyone = [unpack(vectors.amax(0), one, replica, 2, apart=2).snapshots for replica, one in said]
    expected = [SnapshotState(1, own, own - 1, 0, False, others=14) for own in (11, 11, 18, 18)]
    assert everyone == expected
    (_, one), alone = said[0], unpack(vectors[:2].amax(0), said[0][1], 0, 2, apart=2).snapshots
    assert one.snapshots is not None and alone == replace(expected[0], others=7)


@pytest.mark.parametrize("with_snapshots", [False, True])
def test_every_rank_hears_how_long_each_computed(with_snapshots: bool) -> None:
    state = SnapshotState(1, -1, -1, 0, True) if with_snapshots else None
    seconds = [(700, 0, 0), (0, 800, 0), (0, 0, 900)]
    plans = agreed([(0, proposal([8], 1, 1, snapshots=state, compute_us=own)) for own in seconds], 1)
    assert [plan.compute_us for plan in plans] == [(700, 800, 900)] * 3
    assert [plan.peak_bytes for plan in plans] == [()] * 3
    assert all(plan.snapshots == state for plan in plans)


@pytest.mark.parametrize("torn", [0, 1])
def test_ranks_of_one_replica_that_read_different_rows_are_reported_so_alike(torn: int) -> None:
    said = [(1 - torn, proposal([8], 1, 5)), (torn, proposal([8], 1, 6)), (torn, proposal([8], 1, 7))]
    vectors = torch.stack([pack(one, replica, 2) for replica, one in said]).amax(0)
    for replica, one in said:
        with pytest.raises(DataError, match=f"the ranks of replica {torn} read different rows"):
            unpack(vectors, one, replica, 2)


def test_every_rank_hears_the_peak_of_each_pipeline_rank() -> None:
    state, seconds = SnapshotState(1, -1, -1, 0, True), [(700, 0), (0, 800), (0, 0), (0, 0)]
    peaks = [(5 << 40, 0), (0, 7), (3, 0), (0, 9)]
    ranks = zip(peaks, seconds, strict=True)
    plans = agreed(
        [
            (0, proposal([8], 1, 1, snapshots=state, peak_bytes=own, compute_us=us, alloc_retries=us[0] // 100))
            for own, us in ranks
        ],
        1,
    )
    assert [plan.alloc_retries for plan in plans] == [7] * 4
    assert [(plan.peak_bytes, plan.compute_us) for plan in plans] == [((5 << 40, 9), (700, 800))] * 4


def test_a_replica_that_agrees_in_itself_knows_nothing_of_the_others() -> None:
    said = [proposal([16, 24], 30, 99), proposal([24, 16], 30, 99)]
    for plan in agreed([(1, one) for one in said], 2):
        assert (plan.seq_lens, plan.global_tokens) == ((24, 24), 30)
        assert plan.replica_tokens == (0, 30) and plan.tokens_apart(2) == [0, 30]
