"""A reporter for tests: it keeps the events it is told and wants nothing."""

from __future__ import annotations

from typing import Any

from raypp.records import Event, Requests


class Told:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def phase(self, name: str, detail: str = "") -> None:
        pass

    def step(self, report: Any) -> None:
        pass

    def event(self, event: Event) -> None:
        self.events.append(event)

    def requests(self) -> Requests:
        return Requests()

    def kinds(self) -> list[str]:
        return [event.kind for event in self.events]
