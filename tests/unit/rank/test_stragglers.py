"""Stragglers, loss spikes, checksums and injected faults: the parts without processes."""

import pytest
import torch

from raypp.errors import JobError
from raypp.job.load import parse_job
from raypp.planning.resolve import resolve_pipeline
from raypp.rank.fault_injection import Fault, Injection, parse_faults
from raypp.rank.step.nonfinite import Origin, first_of
from raypp.rank.step.replicas import checksum, difference_in_words
from raypp.rank.step.stragglers import SpikeWatch, StragglerWatch, work_of
from raypp.records import Coordinates, Seat


def test_a_rank_is_reported_once_after_three_slow_steps_in_a_row() -> None:
    watch = StragglerWatch([0, 0, 1, 1], [4.0, 4.0], 2.0)
    slow, even = [1.0, 1.0, 1.0, 2.5], [1.0, 1.0, 1.0, 1.1]
    reported = [watch.seen(seconds) for seconds in (slow, slow, even, slow, slow, slow, slow, slow)]
    assert [bool(found) for found in reported] == [False] * 5 + [True, False, False]
    assert reported[5] == [(3, 2.5)]


def test_stages_of_unequal_work_are_compared_by_what_the_cut_gave_them() -> None:
    watch = StragglerWatch([0, 1, 2], [4.0, 4.0, 12.0], 2.0)
    assert not any(watch.seen([1.0, 1.0, 3.0]) for _ in range(5))
    assert [rank for _ in range(3) for rank, _ in watch.seen([1.0, 3.0, 3.0])] == [1]


def test_the_cut_gives_each_rank_the_layers_and_ends_of_its_stages() -> None:
    ends = {"input_weight": 0.5, "output_weight": 2.0}
    pipeline = {"schedule": "zbv", "stages_per_rank": 2, "layers_per_stage": [3, 2, 2, 1], **ends}
    job = parse_job({"name": "a", "model": {"num_layers": 8}, "mesh": {"pp": 2}, "pipeline": pipeline})
    assert work_of(resolve_pipeline(job)) == [3 + 1 + 0.5 + 2.0, 2 + 2]


def test_a_loss_far_above_the_last_ones_is_a_spike_and_nan_never_becomes_usual() -> None:
    watch = SpikeWatch(3.0)
    assert [watch.seen(2.0) for _ in range(5)] == [None] * 5
    assert watch.seen(float("nan")) is None
    assert watch.seen(6.5) == 2.0 and watch.seen(5.9) is None
    assert all(SpikeWatch(None).seen(loss) is None for loss in [1.0] * 9 + [99.0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
def test_any_bit_anywhere_changes_the_checksum(dtype: torch.dtype) -> None:
    weights = torch.arange(3000).to(dtype)
    before, seen = checksum(weights), set()
    for position in (0, 1, 1499, 2999):
        word = weights.view(torch.uint8)[position * weights.element_size() :][:1]
        for bit in range(8):
            word.bitwise_xor_(1 << bit)
            seen.add(checksum(weights))
            word.bitwise_xor_(1 << bit)
    assert checksum(weights) == before and before not in seen and 0 <= before < 2**61
    assert checksum(weights[:0]) == 0


def test_the_rank_that_stands_alone_is_named_where_three_hold_the_weights() -> None:
    labels = ["pp0-dp0", "pp0-dp1", "pp0-dp2"]
    words = difference_in_words(["a.weight"], [{0: 5, 1: 6, 2: 5}], labels)
    assert "a.weight; rank 1 (pp0-dp1) differs from most others" in words
    assert "it is unknown which is right" in difference_in_words(["a.weight"], [{0: 5, 2: 6}], labels)


def _origin(what: str, stage: int, microbatch: int) -> Origin:
    return Origin(what, stage, f"pp{stage}", stage, microbatch, "layers.1")


def test_of_forwards_the_earliest_stage_is_the_origin_and_of_backwards_the_latest() -> None:
    seen = [_origin("gradient", 0, 2), _origin("output", 2, 1), _origin("output", 1, 1), _origin("gradient", 3, 0)]
    assert first_of(seen) == seen[2]
    assert first_of([seen[0], seen[3]]) == seen[3]
    assert first_of([]) is None


def test_faults_are_read_from_one_line() -> None:
    assert parse_faults("kill@forward:rank=1,step=3; slow@forward:seconds=0.5,attempt=0;") == [
        Fault("kill", "forward", 1, 3),
        Fault("slow", "forward", None, None, 0, 0.5),
    ]
    for wrong in ("kill", "kill@nowhere", "sing@save", "kill@save:where=1"):
        with pytest.raises(JobError, match="RAYPP_FAULTS"):
            parse_faults(wrong)


def _injected(text: str, rank: int = 0, attempt: int = 1) -> Injection:
    seat = Seat("run", attempt, rank, 2, Coordinates(), Coordinates(2, 1, 1, 1, 1))
    return Injection(parse_faults(text), seat, last_step=9)


@pytest.mark.parametrize(
    ("moment", "marks"),
    [
        ("load", [("load", "")]),
        ("first_step", [("step", "5 read")]),
        ("last_step", [("step", "9 read")]),
        ("data", [("step", "5 read")]),
        ("collective", [("step", "agree")]),
        ("forward", [("step", "0F0")]),
        ("backward", [("step", "1I3")]),
        ("p2p", [("step", "1F3 waits")]),
        ("optimizer", [("step", "update")]),
        ("save", [("save", "step 5")]),
    ],
)
def test_a_fault_comes_once_at_its_moment_on_its_rank(moment: str, marks: list[tuple[str, str]]) -> None:
    injection = _injected(f"raise@{moment}:rank=0")
    with pytest.raises(RuntimeError, match=f"injected at {moment}"):
        for mark in marks:
            injection.phase(*mark)
    for quiet in (injection, _injected(f"raise@{moment}:rank=1"), _injected(f"raise@{moment}", attempt=2)):
        for mark in marks:
            quiet.phase(*mark)


def test_a_fault_of_a_step_waits_for_that_step() -> None:
    injection = _injected("host_oom@forward:step=6")
    for mark in ("5 read", "0F0", "6 read"):
        injection.phase("step", mark)
    with pytest.raises(MemoryError):
        injection.phase("step", "0F0")
