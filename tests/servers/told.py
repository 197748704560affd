"""A reporter for tests: it keeps all reports and makes no requests."""

from __future__ import annotations

from raypp.records import Event, Requests, StepReport


class Told:
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
