"""Stand-ins that take their time to leave an attempt, as on a busy machine."""

from __future__ import annotations

import time

import stand_in

from raypp.records import Seat

run_rank = stand_in.run_rank


def leave(seat: Seat) -> None:
    time.sleep(6)
    stand_in.leave(seat)
