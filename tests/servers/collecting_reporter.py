"""A reporter for tests: it keeps all reports, and makes the requests that it is told to make."""

from collections.abc import Callable

from raypp.records import Event, Requests, StepReport


class CollectingReporter:
    def __init__(self, asks: Callable[[int], Requests] = lambda asked: Requests()) -> None:
        self.events: list[Event] = []
        self.reports: list[StepReport] = []
        self.phases: set[str] = set()
        self.asked, self._asks = 0, asks

    def phase(self, name: str, detail: str = "", reached: object = None) -> None:
        self.phases.add(name)

    def step(self, report: StepReport) -> None:
        self.reports.append(report)

    def event(self, event: Event) -> None:
        self.events.append(event)

    def requests(self) -> Requests:
        self.asked += 1
        return self._asks(self.asked)

    def kinds(self) -> list[str]:
        return [event.kind for event in self.events]
