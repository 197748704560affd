"""Whatever goes wrong while a run ends, its processes are ended. The leader has no cluster here."""

from __future__ import annotations

from pathlib import Path

import pytest

from raypp.control.leader import Leader
from raypp.control.protocol import RunRequest
from raypp.spec.load import job_document, parse_job


class _Failing(Leader):
    """Fails at its first turn, and has processes that cannot be ended one by one."""

    def __init__(self, store: Path, has_resources: bool) -> None:
        job = parse_job({"name": "r", "checkpoint": {"url": str(store)}})
        super().__init__(RunRequest("r", job_document(job)), None, restarted=False)
        self.ended: list[str] = []
        self._has = has_resources

    def _begin(self) -> None:
        self._has_resources = self._has
        raise KeyError(0)

    def _end_by_handle(self) -> None:
        self.ended.append("one by one")
        raise AttributeError("a worker without a name")

    def _end_by_name(self) -> None:
        self.ended.append("by name")


@pytest.mark.parametrize(("has_resources", "ways"), [(True, ["one by one", "by name"]), (False, ["by name"])])
def test_processes_that_cannot_be_ended_one_by_one_are_ended_by_the_name_of_their_run(
    tmp_path: Path, has_resources: bool, ways: list[str]
) -> None:
    leader = _Failing(tmp_path, has_resources)
    leader.run()
    assert leader.ended == ways
    outcome = leader.outcome
    assert outcome is not None and (outcome.state, outcome.exit_code) == ("FAILED", 1)
    assert outcome.reason == "the controller failed: KeyError: 0"
