"""Commands to a controller that is being restarted. No cluster: only what Ray raises is real."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError

from raypp.control.controller import Controller
from raypp.control.driver import answer_of
from raypp.control.leader import Leader
from raypp.control.machine import RunPhase
from raypp.control.protocol import RunRequest
from raypp.spec.load import job_document, parse_job


def _ask(failures: list[Exception]) -> Callable[[], dict[str, Any]]:
    def ask() -> dict[str, Any]:
        if failures:
            raise failures.pop(0)
        return {"state": "STOPPED"}

    return ask


def _away() -> Exception:
    return ActorUnavailableError("the connection broke", None)


def test_a_controller_that_restarts_is_asked_again() -> None:
    assert answer_of(_ask([_away(), _away()]), 60.0) == {"found": True, "state": "STOPPED"}


def test_a_controller_that_has_ended_is_not_found() -> None:
    assert answer_of(_ask([_away(), ActorDiedError()]), 60.0) == {"found": False}


def test_a_controller_that_does_not_come_back_is_not_taken_for_one_that_has_ended() -> None:
    with pytest.raises(ActorUnavailableError):
        answer_of(_ask([_away()] * 1000), 0.5)


def test_a_save_waits_until_the_restarted_controller_has_taken_its_ranks_over(tmp_path: Path) -> None:
    job = parse_job({"name": "r", "checkpoint": {"url": str(tmp_path)}})
    leader = Leader(RunRequest("r", job_document(job)), None, restarted=True)
    controller = Controller.__new__(Controller)
    controller._leader = leader

    def take_over() -> None:
        leader.machine = replace(leader.machine, phase=RunPhase.RUNNING, committed_step=7)
        leader.begun.set()

    threading.Timer(0.3, take_over).start()
    assert controller.save(60.0)["committed"] == 7
    leader.record.close()
