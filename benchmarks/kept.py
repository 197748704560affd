"""What a benchmark has found so far, on disk: an interruption loses the run that is under way, not those before it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.surroundings import describe

FOLDER = Path.home() / ".cache" / "raypp" / "benchmarks"


def add_resume(parser: argparse.ArgumentParser) -> None:
    """The argument that makes a benchmark go on where it was interrupted."""
    help_text = "go on where the last one was interrupted (its settings must be the same)"
    parser.add_argument("--resume", action="store_true", help=help_text)


class Kept:
    """Results by key, written whenever there is a new one.

    Args:
        name: The benchmark's.
        settings: What the results depend on; those of other settings are not gone on from.
        resume: Take what is there. Otherwise it is begun anew.

    Raises:
        SystemExit: What is there was measured with other settings.
    """

    def __init__(self, name: str, settings: Mapping[str, Any], *, resume: bool) -> None:
        self.path = FOLDER / f"{name}.json"
        self._document: dict[str, Any] = {"settings": dict(settings), "begun": describe(), "found": {}}
        if resume and self.path.exists():
            there = json.loads(self.path.read_text())
            if there["settings"] != json.loads(json.dumps(self._document["settings"])):
                raise SystemExit(
                    f"{self.path} holds results of other settings, {there['settings']}: leave --resume out"
                )
            self._document = there
            print(f"going on with {len(there['found'])} results of {there['begun']}", flush=True)
        print(f"results so far: {self.path}", flush=True)

    @property
    def begun(self) -> str:
        """What the results need beside them: date, hardware, versions and commit when they were begun."""
        return str(self._document["begun"])

    def __contains__(self, key: str) -> bool:
        return key in self._document["found"]

    def __getitem__(self, key: str) -> Any:
        return self._document["found"][key]

    def keep(self, key: str, result: Any) -> Any:
        """The result of that key: what is there, or else `result`, which is written."""
        return self.once(key, lambda: result)

    def once(self, key: str, measure: Callable[[], Any]) -> Any:
        """The result of that key: what is there, or what `measure` returns (plain JSON), which is written at once."""
        found = self._document["found"]
        if key not in found:
            found[key] = measure()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            fresh = self.path.with_suffix(".new")
            fresh.write_text(json.dumps(self._document, indent=1))
            fresh.replace(self.path)
        return found[key]
