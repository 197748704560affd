"""Reporters for tests: they keep all reports."""

from __future__ import annotations

from collections.abc import Callable

from raypp.records import Event, Requests, StepReport


class Told:
    """Makes no requests."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.reports: list[StepReport] = []

    def phase(self, name: str, detail: str = "", reached: object = None) -> None:
        pass

    def step(self, report: StepReport) -> None:
        self.reports.append(report)

    def event(self, event: Event) -> None:
        self.events.append(event)

    def requests(self) -> Requests:
        return Requests()

    def kinds(self) -> list[str]:
        return [event.kind for event in self.events]


class Asking(Told):
    """Makes the requests that a function of the query's number, from 1, returns."""

    def __init__(self, wanted: Callable[[int], Requests]) -> None:
        super().__init__()
        self._wanted, self._queries = wanted, 0

    def requests(self) -> Requests:
        self._queries += 1
        return self._wanted(self._queries)
