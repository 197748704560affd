"""The actor of one rank that uses a trained model. Reaches the runtime, as `worker.py` does."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Mapping
from typing import Any

from raypp.control.credentials import load_private_environment
from raypp.control.protocol import WorkerInfo
from raypp.control.rank_process import process_title, set_seat_environment, worker_info
from raypp.environment import check_node
from raypp.records import Seat


class InferenceWorker:
    """One process of an evaluation or a generation. Ray calls its methods in their own threads.

    It belongs to the Ray job that made it and ends with it.
    """

    def __init__(self, name: str, environment: Mapping[str, str]) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._reports: list[Mapping[str, Any]] = []
        self._over = False
        load_private_environment()
        os.environ.update(environment)

    def __repr__(self) -> str:
        return self._name

    def info(self) -> WorkerInfo:
        """Returns where this process runs, and a port of its node that is free now.

        Raises:
            JobError: The node lacks what raypp needs.
        """
        check_node(f"node {socket.gethostname()}")
        return worker_info()

    def prepare(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Prepares rank 0 for tasks; see `inference.on_seat.prepare`."""
        from raypp.inference.on_seat import prepare

        return prepare(request)

    def run(self, request: Mapping[str, Any], seat: Seat) -> dict[str, Any]:
        """Does this rank's part; see `inference.on_seat.use_model`."""
        from raypp.inference.on_seat import use_model

        set_seat_environment(seat)
        try:
            with process_title(f"ray::{self._name}"):
                return use_model(request, seat, self._add_report)
        finally:
            with self._changed:
                self._over = True
                self._changed.notify_all()

    def reports(self, timeout_s: float) -> list[Mapping[str, Any]]:
        """Returns what the rank has reported since the last call.

        Waits for the first report, or for the rank's end.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._reports or self._over, timeout_s)
            reports, self._reports = self._reports, []
        return reports

    def _add_report(self, report: Mapping[str, Any]) -> None:
        with self._changed:
            self._reports.append(report)
            self._changed.notify_all()
