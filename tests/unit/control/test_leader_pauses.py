"""A leader that was paused judges no rank by the time that it missed."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from raypp.control.hang_watch import HangWatch
from raypp.control.leader import Leader
from raypp.control.machine import RunPhase
from raypp.control.protocol import RunRequest
from raypp.control.seats import Rank
from raypp.records import Coordinates
from raypp.spec.load import job_document, parse_job


def test_neither_the_turn_that_was_paused_nor_the_next_one_finds_a_hang(tmp_path: Path) -> None:
    job = parse_job({"name": "r", "checkpoint": {"url": str(tmp_path)}})
    leader = Leader(RunRequest("r", job_document(job)), None, restarted=False)
    leader.machine = replace(leader.machine, phase=RunPhase.RUNNING)
    now = time.monotonic()
    watch = HangWatch([Rank(0, "pp0", Coordinates(), 0, "", "node", 1)], 3.0, now - 10.0)
    watch.add_step(0.1)
    assert watch.stalled(now) is not None
    leader._reports.watch = watch
    leader._listened_at = now - 10.0
    nothing_to_blame = cast(Any, None)
    leader._check_hang(nothing_to_blame)
    leader._notice_pause()
    leader._check_hang(nothing_to_blame)
    assert leader._reports.watch is watch and watch.oldest_heartbeat_s(now) < 1.0
    leader.record.close()
