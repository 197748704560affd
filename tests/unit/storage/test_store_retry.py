"""How long a command and a training process ask a failing store."""

import pytest

from raypp.storage.store import COMMAND_S, COMMAND_SILENCE_S, LONG_S, bounded_command, patience_from_environment


def test_a_command_is_less_patient_than_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAYPP_STORE_PATIENCE_S", raising=False)
    assert patience_from_environment().total_s == LONG_S
    with bounded_command():
        assert patience_from_environment().total_s == COMMAND_S
        assert patience_from_environment().silence_s == COMMAND_SILENCE_S
    monkeypatch.setenv("RAYPP_STORE_PATIENCE_S", "300")
    with bounded_command():
        assert patience_from_environment().total_s == 300.0
    assert patience_from_environment().silence_s > COMMAND_SILENCE_S
