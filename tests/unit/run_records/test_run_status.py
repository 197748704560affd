"""A run whose controller is gone does not count as running forever."""

import pytest

from raypp.records import RunState
from raypp.state.run_records.quantities import METRICS
from raypp.state.run_records.status import GONE_AFTER_S, SILENT_AFTER_S, RunStatus, is_final, without_a_sign_of_life


def status(state: RunState = RunState.RUNNING, error: str | None = None) -> dict:
    return RunStatus("r", state, step=3, error=error, updated_at=1000.0).as_dict()


@pytest.mark.parametrize("state", RunState)
def test_final_states_are_final(state):
    assert is_final(status(state)) == (str(state) in ("SUCCEEDED", "FAILED", "STOPPED"))


@pytest.mark.parametrize("state", [RunState.SUCCEEDED, RunState.STOPPED, RunState.FAILED])
def test_an_ended_run_stays_as_it_ended(state):
    assert without_a_sign_of_life(status(state), False, 1e9) == status(state)


def test_a_silent_run_whose_controller_lives_is_left_alone():
    assert without_a_sign_of_life(status(), True, 1e9) == status()


@pytest.mark.parametrize(("alive", "limit"), [(False, GONE_AFTER_S), (None, SILENT_AFTER_S)])
def test_a_silent_run_without_a_controller_has_failed(alive, limit):
    assert without_a_sign_of_life(status(), alive, 1000.0 + limit - 1) == status()
    judged = without_a_sign_of_life(status(), alive, 1000.0 + limit + 1)
    assert judged["state"] == "FAILED"
    assert "RUNNING" in judged["error"]
    assert "--resume" in judged["error"]
    assert judged["step"] == 3


def test_the_error_a_run_had_before_it_fell_silent_is_kept():
    assert "disk on fire" in without_a_sign_of_life(status(error="disk on fire"), False, 1e9)["error"]


def test_metric_names_are_distinct_and_prefixed():
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    assert all(name.startswith("raypp_") for name in names)
