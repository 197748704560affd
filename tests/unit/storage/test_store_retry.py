"""Budgets of commands."""

from __future__ import annotations

import pytest

from raypp.storage import store_retry
from raypp.storage.store_retry import Budget, bounded_command, patience_from_environment


def test_requests_that_fail_at_the_same_time_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(store_retry.time, "monotonic", lambda: now)
    budget = Budget(30.0)
    budget.begin(2.0)
    now = 5.0
    budget.begin(5.0)
    assert budget.left_s == 23.0
    budget.end()
    now = 10.0
    budget.end()
    assert budget.left_s == 18.0
    now = 110.0
    assert budget.left_s == 23.0  # a twentieth of the time without failures
    now = 1e6
    assert budget.left_s == 30.0


def test_only_a_command_has_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAYPP_STORE_PATIENCE_S", raising=False)
    assert patience_from_environment().budget is None
    with bounded_command():
        first, second = patience_from_environment(), patience_from_environment()
        assert first.budget is second.budget is not None
        assert first.budget.total_s == store_retry.COMMAND_S
    assert patience_from_environment().budget is None
    monkeypatch.setenv("RAYPP_STORE_PATIENCE_S", "300")
    with bounded_command():
        patience = patience_from_environment()
        assert patience.budget is not None and patience.budget.total_s == 300.0
