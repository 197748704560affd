"""Residuals of int8 sums: which saved ones a replica takes, so that their sum stays."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from raypp.records import Coordinates
from raypp.stages.parallel.outer_sync import OuterState
from raypp.stages.parallel.replica_sums import Residuals
from raypp.state.checkpoint.state import OUTER_MOMENTUM, gather_state, residual_slices

WEIGHT = "model.embed_tokens.weight"


def stage(replica: int, replicas: int, *, copy: bool = False, both_ends: bool = False) -> Any:
    """Returns a stage with one weight and its residual, 100 plus the replica's number."""
    made: Any = nn.Module()
    made.model = nn.Module()
    made.model.embed_tokens = nn.Embedding(2, 3)
    made.tied_copies = frozenset((WEIGHT,) if copy else ())
    made.holds_both_ends = both_ends
    held: Any = {WEIGHT: torch.full((2, 3), 100.0 + replica)}
    made.replica_residuals = Residuals(replica, replicas, held)
    return made


def names(replicas: int, *, copies: bool = False) -> list[str]:
    kinds = ("residual", "residual_of_copy") if copies else ("residual",)
    return [f"optim/{WEIGHT}/{kind}.{replica}" for kind in kinds for replica in range(replicas)]


def loaded(stages: Sequence[Any], saved: Sequence[str]) -> tuple[list[float], str]:
    """Loads residuals whose values are 2 to the power of their place; returns each stage's."""
    plan = residual_slices(stages, ["optim/other/exp_avg", *saved])
    for name, parts in plan.targets.items():
        for part in parts:
            part.tensor.fill_(2.0 ** list(saved).index(name))
    plan.finish()
    residuals = [float(one.replica_residuals.parts[WEIGHT].unique()) for one in stages]
    return residuals, plan.remark


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 2), (2, 3), (3, 2), (4, 2), (7, 3)])
def test_the_sum_over_replicas_stays(before: int, after: int) -> None:
    saved = names(before)
    residuals = [loaded([stage(replica, after)], saved) for replica in range(after)]
    assert sum(value for (value,), _ in residuals) == 2.0**before - 1
    remarks = {remark for _, remark in residuals}
    assert remarks == {
        "" if before == after
        else f"residuals of quantised sums: those of {before} replicas go to {after}, their sum unchanged"
    }  # fmt: skip


def test_as_many_replicas_take_their_own() -> None:
    assert [loaded([stage(replica, 3)], names(3))[0] for replica in range(3)] == [[1.0], [2.0], [4.0]]


def test_without_saved_ones_they_begin_at_zero() -> None:
    assert loaded([stage(0, 2)], []) == (
        [0.0], "the checkpoint has no residuals of quantised sums: they begin at zero",
    )  # fmt: skip


def test_exact_sums_have_none_and_say_that_they_are_dropped() -> None:
    plan = residual_slices([nn.Linear(1, 1)], names(2))
    assert not plan.targets and "the residuals of 2 replicas" in plan.remark and "dropped" in plan.remark


def test_a_tied_weights_copy_has_its_own_and_a_stage_with_both_ends_takes_both() -> None:
    saved = names(2, copies=True)
    assert loaded([stage(1, 2)], saved) == ([2.0], "")
    assert loaded([stage(1, 2, copy=True)], saved) == ([8.0], "")
    assert loaded([stage(1, 2, both_ends=True)], saved) == ([10.0], "")
    assert loaded([stage(1, 2, copy=True)], names(2)) == ([0.0], "")


def test_every_replica_writes_its_own() -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters())
    for replica in range(2):
        place = Coordinates(0, replica)
        state = gather_state([stage(replica, 2)], optimizer, place)
        assert [name for name in state if "residual" in name] == [f"optim/{WEIGHT}/residual.{replica}"]
        assert not state[f"optim/{WEIGHT}/residual.{replica}"].moving
    copy = gather_state([stage(1, 2, copy=True)], optimizer, Coordinates(1, 1))
    assert list(copy) == [f"optim/{WEIGHT}/residual_of_copy.1"]


@pytest.mark.parametrize(("before", "after"), [(2, 2), (3, 2), (2, 4)])
def test_a_replica_that_trains_apart_takes_those_of_the_one_it_goes_on_as_without_optimizer_state(
    before: int, after: int
) -> None:
    saved = names(before)
    for replica in range(after):
        one = stage(replica, after)
        one.outer_state = OuterState(replica, after, {WEIGHT: torch.zeros(2, 3)}, {})
        plan = residual_slices([one], [f"optim/{WEIGHT}/{OUTER_MOMENTUM}", *saved])
        assert set(plan.targets) == {f"optim/{WEIGHT}/{OUTER_MOMENTUM}", saved[replica % before]}
        assert not plan.added and not plan.cleared
